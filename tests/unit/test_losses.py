"""Losses add up: the sum and count of a batch are those of its parts, padded or joined in rows."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from law_rows import in_one_test
from phalanx.errors import LossError
from phalanx.train.loss import accuracy, cross_entropy, load_balancing_loss, mse, next_token_loss, router_z_loss
from phalanx.train.padding_free import counted_tokens, joined_dimensions, row_lengths, unlike_alone

pytestmark = pytest.mark.quick
torch.manual_seed(0)
LOGITS_BC = torch.randn(6, 4)
LABELS_B = torch.tensor([0, 3, -100, 1, 2, -100])
LOGITS_BTV = torch.randn(3, 5, 7)
TOKENS_BT = torch.randint(0, 7, (3, 5))
MASK_BT = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])


@in_one_test("smoothing", [0.0, 0.1])
def test_cross_entropy_divided_by_its_count_is_torchs_mean(smoothing):
    loss = cross_entropy(LOGITS_BC, LABELS_B, label_smoothing=smoothing)
    assert int(loss.count) == 4
    torch.testing.assert_close(loss.sum / loss.count, F.cross_entropy(LOGITS_BC, LABELS_B, label_smoothing=smoothing))


def test_probabilities_count_as_torchs_do_and_rows_of_zeros_do_not_count():
    soft, smooth = LOGITS_BTV.roll(1, 0).softmax(-1), {"label_smoothing": 0.1}
    loss = cross_entropy(LOGITS_BTV, soft, **smooth)
    torch.testing.assert_close(
        loss.sum / loss.count, F.cross_entropy(LOGITS_BTV.flatten(0, 1), soft.flatten(0, 1), **smooth)
    )
    left = cross_entropy(LOGITS_BTV, soft * MASK_BT[..., None], **smooth)
    rows = cross_entropy(LOGITS_BTV[MASK_BT > 0], soft[MASK_BT > 0], ignore_index=None, **smooth)
    assert (float(left.sum), int(left.count)) == (pytest.approx(float(rows.sum)), rows.count)
    hard = F.one_hot(TOKENS_BT, 7).half()
    torch.testing.assert_close(cross_entropy(LOGITS_BTV, hard), cross_entropy(LOGITS_BTV, TOKENS_BT))
    for wrong, how, said in (
        (soft.transpose(1, 2).reshape(soft.shape), {}, "no probabilities"),  # as torch has images: classes first
        (soft * 3, {}, "sum to 1, or to 0"),
        (soft, {"ignore_index": 2}, "ignore_index=2 with probabilities"),
    ):
        with pytest.raises(LossError, match=said):
            cross_entropy(LOGITS_BTV, wrong, **how)


def test_cross_entropy_takes_the_class_last_and_model_outputs():
    plain = cross_entropy(LOGITS_BTV, TOKENS_BT)
    torch.testing.assert_close(plain.sum, F.cross_entropy(LOGITS_BTV.mT, TOKENS_BT, reduction="sum"))
    assert int(plain.count) == 15
    assert cross_entropy(SimpleNamespace(logits=LOGITS_BTV), TOKENS_BT).sum == plain.sum


@in_one_test("cut", [1, 2, 3])
def test_parts_add_up_to_the_whole(cut):
    for loss in (cross_entropy, accuracy):
        whole = loss(LOGITS_BC, LABELS_B)
        parts = [loss(LOGITS_BC[:cut], LABELS_B[:cut]), loss(LOGITS_BC[cut:], LABELS_B[cut:])]
        torch.testing.assert_close(sum(part.sum for part in parts), whole.sum)
        assert sum(int(part.count) for part in parts) == int(whole.count)


def test_a_part_without_targets_weighs_nothing_and_still_has_gradients():
    logits = LOGITS_BC.clone().requires_grad_()
    loss = cross_entropy(logits, torch.full((6,), -100))
    loss.sum.backward()
    assert loss.sum.item() == 0.0
    assert int(loss.count) == 0
    assert logits.grad is not None
    assert not logits.grad.any()


@in_one_test("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_fp32_in_low_precision(dtype):
    assert cross_entropy(LOGITS_BC.to(dtype), LABELS_B).sum.dtype == torch.float32
    assert mse(LOGITS_BC.to(dtype), LOGITS_BC.to(dtype)).sum.dtype == torch.float32
    assert cross_entropy(LOGITS_BC.double(), LABELS_B).sum.dtype == torch.float64


def test_next_token_loss_shifts_by_one():
    loss = next_token_loss(LOGITS_BTV, TOKENS_BT)
    torch.testing.assert_close(loss.sum, F.cross_entropy(LOGITS_BTV[:, :-1].mT, TOKENS_BT[:, 1:], reduction="sum"))
    assert loss.count == 12


def test_next_token_loss_does_not_count_padding():
    loss = next_token_loss(LOGITS_BTV, TOKENS_BT, MASK_BT)
    logp = LOGITS_BTV.log_softmax(-1)
    real = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    torch.testing.assert_close(loss.sum, -sum(logp[b, t, TOKENS_BT[b, t + 1]] for b, t in real))
    assert int(loss.count) == len(real)
    torch.testing.assert_close(next_token_loss(LOGITS_BTV, TOKENS_BT, MASK_BT.bool()).sum, loss.sum)


def test_accuracy_counts_only_what_is_not_ignored():
    logits = torch.tensor([[2.0, 1.0], [0.0, 1.0], [3.0, 0.0]])
    assert [int(x) for x in accuracy(logits, torch.tensor([0, 0, -100]))] == [1, 2]


@in_one_test(
    ("call", "text"),
    [
        (lambda: cross_entropy(LOGITS_BC, TOKENS_BT), "one last axis more"),
        (lambda: cross_entropy(LOGITS_BTV.mT, TOKENS_BT), r"movedim\(1, -1\)"),
        (lambda: cross_entropy(LOGITS_BC, LABELS_B.float()), "whole class numbers"),
        (lambda: cross_entropy({"scores": LOGITS_BC}, LABELS_B), "is a dict"),
        (lambda: next_token_loss(LOGITS_BTV, TOKENS_BT, MASK_BT[:, :3]), "mask has shape"),
        (lambda: next_token_loss(LOGITS_BC, LABELS_B), r"allowed: \(B, T\)"),
        (lambda: mse(LOGITS_BC[:, :1], LOGITS_BC[:, 0]), "equal shapes"),
        (lambda: load_balancing_loss(LOGITS_BC, 2), r"\(B, T, E\)"),
        (lambda: load_balancing_loss(LOGITS_BTV, 8), "1 to E"),
        (lambda: router_z_loss(LOGITS_BTV, MASK_BT[:2]), "mask has shape"),
    ],
)
def test_wrong_shapes_are_named(call, text):
    with pytest.raises(LossError, match=text):
        call()


def test_a_router_that_uses_all_experts_alike_has_a_balance_of_1():
    logits_BTE = torch.eye(4).expand(2, 4, 4) * 50  # each token to an expert of its own
    loss = load_balancing_loss(logits_BTE, 1)
    assert loss.count == 8
    torch.testing.assert_close(loss.sum, torch.tensor(8.0))
    to_one_BTE = torch.tensor([50.0, 0, 0, 0]).expand(2, 4, 4)
    torch.testing.assert_close(load_balancing_loss(to_one_BTE, 1).sum, torch.tensor(32.0))


@in_one_test("loss", [lambda *given: load_balancing_loss(given[0], 2, *given[1:]), router_z_loss])
def test_losses_of_a_router_add_up_over_sequences(loss):
    for mask in ((), (MASK_BT,)):
        whole = loss(LOGITS_BTV, *mask)
        parts = [loss(LOGITS_BTV[b : b + 1], *(one[b : b + 1] for one in mask)) for b in range(3)]
        torch.testing.assert_close(sum(part.sum for part in parts), whole.sum)
        assert sum(int(part.count) for part in parts) == int(whole.count)


def test_the_z_loss_of_a_router_by_hand():
    """Four logits of 1 sum up to 4e, whose logarithm is 1 + log 4 (Zoph et al. 2022, equation 5)."""
    loss = router_z_loss(torch.ones(2, 3, 4))
    torch.testing.assert_close(loss.sum, torch.tensor(6 * (1 + math.log(4)) ** 2))
    assert loss.count == 6


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape)


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
