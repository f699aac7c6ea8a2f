"""Losses add up: the sum and count of a batch are those of its parts, whatever the cut."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from phalanx.errors import LossError
from phalanx.train.losses import accuracy, cross_entropy, mse, next_token_loss

torch.manual_seed(0)
LOGITS_BC = torch.randn(6, 4)
LABELS_B = torch.tensor([0, 3, -100, 1, 2, -100])
LOGITS_BTV = torch.randn(3, 5, 7)
TOKENS_BT = torch.randint(0, 7, (3, 5))
MASK_BT = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_divided_by_its_count_is_torchs_mean(smoothing):
    loss = cross_entropy(LOGITS_BC, LABELS_B, label_smoothing=smoothing)
    assert int(loss.count) == 4
    torch.testing.assert_close(loss.sum / loss.count, F.cross_entropy(LOGITS_BC, LABELS_B, label_smoothing=smoothing))


def test_cross_entropy_takes_the_class_last_and_model_outputs():
    plain = cross_entropy(LOGITS_BTV, TOKENS_BT)
    torch.testing.assert_close(plain.sum, F.cross_entropy(LOGITS_BTV.mT, TOKENS_BT, reduction="sum"))
    assert int(plain.count) == 15
    assert cross_entropy(SimpleNamespace(logits=LOGITS_BTV), TOKENS_BT).sum == plain.sum


@pytest.mark.parametrize("cut", [1, 2, 3])
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


def test_count_is_a_plain_number_where_it_is_known():
    assert type(cross_entropy(LOGITS_BTV, TOKENS_BT, ignore_index=None).count) is int
    assert type(next_token_loss(LOGITS_BTV, TOKENS_BT).count) is int
    assert type(mse(LOGITS_BC, LOGITS_BC).count) is int
    assert isinstance(cross_entropy(LOGITS_BTV, TOKENS_BT).count, torch.Tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
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


def test_mse_counts_elements():
    loss = mse(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 4.0]]))
    assert (loss.sum.item(), loss.count) == (5.0, 2)


def test_accuracy_counts_only_what_is_not_ignored():
    logits = torch.tensor([[2.0, 1.0], [0.0, 1.0], [3.0, 0.0]])
    assert [int(x) for x in accuracy(logits, torch.tensor([0, 0, -100]))] == [1, 2]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: cross_entropy(LOGITS_BC, TOKENS_BT), "one last axis more"),
        (lambda: cross_entropy(LOGITS_BTV.mT, TOKENS_BT), r"movedim\(1, -1\)"),
        (lambda: cross_entropy(LOGITS_BC, LABELS_B.float()), "whole class numbers"),
        (lambda: cross_entropy({"scores": LOGITS_BC}, LABELS_B), "is a dict"),
        (lambda: next_token_loss(LOGITS_BTV, TOKENS_BT, MASK_BT[:, :3]), "mask has shape"),
        (lambda: next_token_loss(LOGITS_BC, LABELS_B), r"allowed: \(B, T\)"),
        (lambda: mse(LOGITS_BC[:, :1], LOGITS_BC[:, 0]), "equal shapes"),
        (lambda: accuracy(LOGITS_BC, TOKENS_BT), "one last axis more"),
    ],
)
def test_wrong_shapes_are_named(call, text):
    with pytest.raises(LossError, match=text):
        call()
