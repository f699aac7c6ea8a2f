"""LARS and LAMB on plain tensors against their papers' formulas by hand; rates that follow the batch."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from law_rows import in_one_test
from phalanx.errors import GradientError, SpecError
from phalanx.train.batch_scaling import linear_scaling, scaling_offer
from phalanx.train.optimizers import LAMB, LARS

pytestmark = pytest.mark.quick


def parameter(values, gradient):
    made = nn.Parameter(torch.tensor(values))
    made.grad = torch.tensor(gradient)
    return made


def test_lars_takes_the_step_of_the_paper():
    # |w| = 5, |g| = 2, ratio = 0.1 * 5 / (2 + 0.01 * 5) = 0.24390244
    # u = ratio * (g + 0.01 w) = 0.24390244 * (2.03, 0.04) = (0.49512195, 0.00975610);  w - 0.5 u
    w = parameter([[3.0, 4.0]], [[2.0, 0.0]])
    LARS([w], lr=0.5, momentum=0.9, weight_decay=0.01, trust_coefficient=0.1).step()
    torch.testing.assert_close(w.detach(), torch.tensor([[2.75243902, 3.99512195]]))


@in_one_test("nesterov", [False, True])
def test_lars_leaves_one_dimensional_tensors_to_plain_sgd(nesterov):
    ours, torchs = parameter([3.0, 4.0], [2.0, 0.5]), parameter([3.0, 4.0], [2.0, 0.5])
    mine = LARS([ours], lr=0.1, weight_decay=0.3, nesterov=nesterov)
    reference = SGD([torchs], lr=0.1, momentum=0.9, nesterov=nesterov)
    for _ in range(3):
        mine.step()
        reference.step()
    torch.testing.assert_close(ours, torchs)


def test_lamb_takes_the_step_of_the_paper():
    # t = 1: m / (1 - b1) = g, v / (1 - b2) = g^2, so r = g / (|g| + eps) + 0.1 w = (1.3, -0.6) with eps = 0.
    # ratio = 5 / sqrt(1.3^2 + 0.6^2) = 5 / 1.43178211 = 3.49215148;  w - 0.1 * ratio * r
    w = parameter([[3.0, 4.0]], [[0.5, -0.25]])
    LAMB([w], lr=0.1, eps=0.0, weight_decay=0.1).step()
    torch.testing.assert_close(w.detach(), torch.tensor([[3 - 0.1 * 3.49215148 * 1.3, 4 + 0.1 * 3.49215148 * 0.6]]))


def test_lamb_leaves_one_dimensional_tensors_to_adam():
    ours, torchs = parameter([3.0, 4.0], [2.0, 0.5]), parameter([3.0, 4.0], [2.0, 0.5])
    mine, reference = LAMB([ours], lr=0.1, weight_decay=0.3), AdamW([torchs], lr=0.1, eps=1e-6, weight_decay=0.0)
    for _ in range(3):
        mine.step()
        reference.step()
    torch.testing.assert_close(ours, torchs)


def test_lamb_clips_the_trust_ratio():
    w = parameter([[3.0, 4.0]], [[0.5, -0.25]])
    LAMB([w], lr=0.1, eps=0.0, weight_decay=0.0, trust_clip=(0.0, 2.0)).step()
    torch.testing.assert_close(w.detach(), torch.tensor([[3 - 0.1 * 2.0, 4 + 0.1 * 2.0]]))


@in_one_test("make", [lambda p: LARS(p, lr=0.1), lambda p: LAMB(p, lr=0.1)])
@in_one_test(("weight", "gradient"), [([[0.0, 0.0]], [[1.0, 1.0]]), ([[1.0, 1.0]], [[0.0, 0.0]])])
def test_zero_norms_give_finite_steps(make, weight, gradient):
    w = parameter(weight, gradient)
    make([w]).step()
    assert torch.isfinite(w).all()
    assert (w.detach() != 0).any(), "a zero weight must be able to leave zero"


@in_one_test("make", [lambda p: LARS(p, lr=0.1, trust_coefficient=0.05), lambda p: LAMB(p, lr=0.02)])
def test_learns_a_regression_and_resumes_bit_for_bit(make):
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    y = x @ torch.randn(8, 4)

    def fresh() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        return model, make(model.parameters())

    def train(model, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
        return loss.item()

    model, optimizer = fresh()
    first = train(model, optimizer, 1)
    train(model, optimizer, 9)
    resumed, other = fresh()
    resumed.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(model, optimizer, 40) == train(resumed, other, 40)
    assert train(model, optimizer, 150) < 0.5 * first


@in_one_test(
    ("make", "named"),
    [
        (lambda p: LARS(p, lr=-1.0, momentum=1.0), ["LARS.lr", "LARS.momentum"]),
        (lambda p: LARS(p, lr=math.nan, trust_coefficient=0), ["LARS.lr", "LARS.trust_coefficient"]),
        (lambda p: LARS(p, lr=0.1, momentum=0.0, nesterov=True), ["LARS.nesterov"]),
        (lambda p: LAMB(p, betas=(0.9, 1.0), eps=-1.0), ["LAMB.betas", "LAMB.eps"]),
        (lambda p: LAMB(p, weight_decay=-0.1, trust_clip=(3.0, 2.0)), ["LAMB.weight_decay", "LAMB.trust_clip"]),
    ],
)
def test_names_every_wrong_argument(make, named):
    with pytest.raises(SpecError) as caught:
        make([nn.Parameter(torch.ones(2, 2))])
    assert sorted(problem.where for problem in caught.value.problems) == sorted(named)


def test_refuses_sparse_gradients():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(GradientError, match="sparse"):
        LAMB(table.parameters()).step()


def test_norms_of_large_tensors_are_right():
    # lr = 1 and no decay: the step has the length of the weights. fp32 sums on a CPU would miss it by 2e-5.
    generator = torch.Generator().manual_seed(0)
    w = nn.Parameter(torch.randn(1000, 2000, generator=generator))
    before = w.detach().double()
    w.grad = torch.randn(1000, 2000, generator=generator)
    LARS([w], lr=1.0, momentum=0.0, trust_coefficient=1.0).step()
    length = (w.detach().double() - before).norm() / before.norm()
    assert length.item() == pytest.approx(1.0, abs=1e-6)


def test_the_rate_grows_with_the_batch():
    assert linear_scaling(0.1, batch=8192, base_batch=256) == pytest.approx(3.2)
    assert linear_scaling(1.0, batch=128, base_batch=256) == pytest.approx(0.5)


def test_offer_gives_the_line_to_copy_and_names_warmup():
    text = scaling_offer(256, 512)
    assert text is not None
    assert "--lr-scale 2\n" in text
    assert "--lr-scale 1.414\n" in text
    assert "warm-up" in text
    assert "--lr-scale 0.25\n" in (scaling_offer(256, 64) or "")
    assert scaling_offer(256, 256) is None


@in_one_test(
    "call",
    [
        lambda: scaling_offer(256, 0),
        lambda: linear_scaling(0.1, batch=2.5, base_batch=256),
        lambda: linear_scaling(-0.1, batch=2, base_batch=1),
    ],
)
def test_wrong_batches_are_refused(call):
    with pytest.raises(SpecError):
        call()
