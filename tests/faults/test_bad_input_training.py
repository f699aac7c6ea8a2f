"""What goes wrong between ranks in training: streams, evaluation data, initial values."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from phalanx.errors import PhalanxError

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
from small import Net, fit, table


def fails(match: str, plan: str = "dp=2", **how: Any) -> PhalanxError:
    with pytest.raises(PhalanxError, match=match) as caught:
        fit(plan, "run", **how)
    return caught.value


class Stream:
    """Two global batches on rank 0, three on rank 1."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for index in range(64 + 32 * torch.distributed.get_rank()):
            yield {"x": torch.ones(9), "y": torch.tensor(index % 5)}


def test_streams_that_differ_by_whole_batches() -> None:
    error = fails("the stream has another length on each rank", data=Stream, epochs=None, steps=6)
    assert "epoch by rank: 1, 0" in str(error)
    assert error.step == 2  # type: ignore[attr-defined]


def test_a_stream_that_has_ended_on_one_rank() -> None:
    assert "step by rank: ended, 2" in str(fails("the stream has another length", data=Stream, epochs=1))


def test_evaluation_data_of_another_length_on_each_rank() -> None:
    error = fails("job.evaluate gives data of another length", evaluate=lambda: table(9 + torch.distributed.get_rank()))
    assert "rank 0: 9, rank 1: 10" in str(error)


class Unseeded(Net):
    """Draws from a source of its own."""

    def __init__(self) -> None:
        super().__init__()
        draw = np.random.default_rng().standard_normal((5, 9))
        self.head.weight = nn.Parameter(torch.tensor(draw, dtype=torch.float32))


@pytest.mark.parametrize("plan", ["dp=2", "fsdp=2", "fsdp=2 zero=2"])
def test_initial_values_that_differ(plan: str) -> None:
    error = fails("other initial values on rank 1", plan, model=Unseeded)
    assert "differs: head.weight" in str(error)


class Longer(Net):
    """Has one parameter more on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        if torch.distributed.get_rank() == 1:
            self.extra = nn.Parameter(torch.zeros(2))


def test_a_model_with_more_parameters_on_one_rank() -> None:
    # Registered on the module itself, it comes before those of submodules.
    assert "differs: " in str(fails("other initial values on rank 1", model=Longer))
