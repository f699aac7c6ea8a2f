"""Where a sample is in a batch: in a row of its own, or in one in which all are joined."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.train.padding_free import (
    counted_tokens,
    joined_along,
    joined_dimensions,
    mixes,
    row_lengths,
    rows_of,
    unlike_alone,
)

pytestmark = pytest.mark.quick


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape)


@pytest.mark.parametrize(
    ("whole", "alone", "dim"),
    [
        (zeros(1, 7), [zeros(1, 3), zeros(1, 4)], 1),
        (zeros(1, 7, 5), [zeros(1, 3, 5), zeros(1, 4, 5)], 1),
        (zeros(2, 7), [zeros(2, 3), zeros(2, 4)], 1),  # edges of a graph
        (zeros(7), [zeros(3), zeros(4)], 0),
        (zeros(7, 5), [zeros(3, 5), zeros(4, 5)], 0),
        (zeros(1, 2), [zeros(1, 1), zeros(1, 1)], 1),
        (zeros(2), [zeros(1), zeros(1)], None),  # a row for each
        (zeros(2, 4), [zeros(1, 3), zeros(1, 4)], None),  # padded
        (zeros(2, 4), [zeros(1, 4), zeros(1, 4)], None),
        (zeros(3), [zeros(2), zeros(2)], None),  # where each begins
        (zeros(1, 7), [zeros(1, 3), zeros(1, 3)], None),
        (torch.tensor(0.0), [torch.tensor(0.0)] * 2, None),
        (4, [2, 2], None),
    ],
)
def test_along_which_dimension_samples_are_joined(whole: object, alone: list[object], dim: int | None) -> None:
    assert joined_along(whole, alone) == dim


def batch_of(*texts: list[int]) -> dict[str, Any]:
    lengths, tokens = torch.tensor([len(text) for text in texts]), [token for text in texts for token in text]
    return {
        "ids": torch.tensor([tokens]),
        "labels": torch.tensor([token for text in texts for token in [-100, *text[1:]]])[None],
        "of": torch.arange(len(texts)).repeat_interleave(lengths)[None],
        "ends": torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]),
        "most": int(lengths.max()),
        "weight": torch.tensor([tokens]) / 10,
    }


def test_what_is_of_a_sample_in_a_row() -> None:
    texts = [[4, 5, 6], [7, 8]]
    whole, alone = batch_of(*texts), [batch_of(text) for text in texts]
    assert (row_lengths(whole, alone), joined_dimensions(whole, alone)) == ([3, 2], {1})
    assert counted_tokens(whole, alone) == [2, 1]
    assert unlike_alone(whole, alone) == ""
    drawn = {**whole, "ids": torch.tensor([[4, 0, 6, 7, 8]]), "weight": whole["weight"] + torch.rand(1, 5)}
    assert unlike_alone(drawn, alone) == "ids, weight"
    assert row_lengths(whole, [whole]) == []


def test_a_model_that_mixes_them() -> None:
    alone = [torch.rand(1, 3, 2), torch.rand(1, 4, 2)]
    assert not mixes({"logits": torch.cat(alone, 1)}, [{"logits": one} for one in alone])
    assert mixes(torch.cat([alone[0], alone[1] + 0.1], 1), alone)


def test_rows_of_a_padded_batch() -> None:
    batch = rows_of({"ids": torch.arange(6).view(3, 2), "scale": torch.ones(2)}, [0, 2], 3)
    assert (batch["ids"].tolist(), batch["scale"].tolist()) == ([[0, 1], [4, 5]], [1, 1])
