"""What rounding may make of a parameter where Adam divides each gradient by its own size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.config import Plan
from phalanx.verify.compare import FirstGradient, Tolerance, parameters
from phalanx.verify.evidence import first_gradients
from phalanx.verify.judge import Pair, judged
from phalanx.verify.record import END, FIRST, START, RunRecord, StepRecord

LR, EPS = 1e-3, 1e-8
TOLERANCE = Tolerance(loss=1e-5, gradient=1e-5, scale=1e-5, noise=1e-5, parameter=1e-4)


def adam(start: Tensor, gradient: Tensor) -> Tensor:
    """After the first step of Adam without weight decay: the moments are the gradient and its square."""
    return start - LR * gradient / (gradient.abs() + EPS)


def beyond(gradient: Tensor, off: Tensor, *, error: float = 1e-5, rounded: Tensor | None = None) -> bool:
    """Whether a step with ``gradient + off`` is told from one with ``gradient``."""
    start = torch.zeros_like(gradient)
    known = {"w": FirstGradient(values=gradient, error=error, rounded=rounded)}
    here, there = adam(start, gradient), adam(start, gradient + off)
    (found,) = parameters({"w": start}, {"w": here}, {"w": there}, known, TOLERANCE)
    return found.beyond


def gradient() -> Tensor:
    return torch.randn(2048, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 4e-4


def test_a_gradient_smaller_than_adams_epsilon_turns_its_rounding_into_a_part_of_a_step() -> None:
    """As was measured: both sides err by some 2e-7 of the root mean square, where the step is g / (|g| + 1e-8)."""
    grad, off = gradient(), torch.zeros(2048, dtype=torch.float64)
    grad[7], off[7] = 5.83e-9, 4.5e-7 * 4e-4
    assert abs(adam(torch.zeros(()), grad[7] + off[7]) - adam(torch.zeros(()), grad[7])) > 5e-3 * LR
    assert not beyond(grad, off)
    off[8] = grad[8] * -2  # a sign that rounding cannot turn
    assert beyond(grad, off)


def test_a_sign_that_rounding_may_turn_makes_twice_a_step() -> None:
    grad = torch.ones(32, dtype=torch.float64)
    grad[3] = 0.02
    off = torch.zeros_like(grad)
    off[3] = -0.025
    assert beyond(grad, off, error=1e-3)
    assert not beyond(grad, off, error=0.029)  # of half precision: its own rounding is 0.029 of the root mean square


def test_gradients_doubled_in_one_row_are_told_where_steps_follow_their_size() -> None:
    grad = gradient()
    start = torch.zeros_like(grad)
    known = {"w": FirstGradient(values=grad, error=1e-5)}
    (found,) = parameters({"w": start}, {"w": -LR * grad}, {"w": -LR * grad * 1.02}, known, TOLERANCE)
    assert found.beyond
    assert found.relative > 0.01


def record(first: Tensor, second: Tensor) -> RunRecord:
    """Two steps of a parameter beside a large one; after the first it has moved by a whole step."""
    large, start = torch.full((4,), 1.0), torch.zeros(4)
    values = {START: start, FIRST: adam(start, first), END: adam(adam(start, first), second)}
    others = {START: start, FIRST: adam(start, large), END: adam(adam(start, large), large)}
    return RunRecord(
        steps=[StepRecord(loss=1.0), StepRecord(loss=1.0)],
        values={moment: {"small": values[moment], "large": others[moment]} for moment in (START, FIRST, END)},
        options={"small": {"weight_decay": 0.0}, "large": {"weight_decay": 0.0}},
        reduced={0: {"small": first, "large": large}, 1: {"small": second, "large": large}},
    )


def test_what_rounding_alone_has_moved_may_be_off_by_twice_that() -> None:
    rounding, meant = torch.full((4,), 1e-7), torch.full((4,), 0.1)
    one, other = record(rounding, meant), record(-rounding, meant)
    known = first_gradients(one, TOLERANCE)
    assert known["large"].rounded is None
    assert torch.equal(known["small"].values, meant)
    moved = known["small"].rounded
    assert moved is not None
    assert torch.allclose(moved, torch.full((4,), LR * 0.909), rtol=1e-2)  # 1e-7 / (1e-7 + 1e-8)
    off = {one.name: one for one in parameters(one.values[START], one.values[END], other.values[END], known, TOLERANCE)}
    assert not off["small"].beyond
    assert off["small"].relative > 0.9
    pair = Pair(one=one, other=other, plan=Plan(), tolerance=TOLERANCE)
    assert pair.silent == ["small"]
    with pytest.MonkeyPatch.context() as patch:  # once for a proof, which asks for it several times
        patch.setattr("phalanx.verify.compare.gradients", None)
        assert pair.silent == ["small"]
    checks = {check.when: check for check in judged(pair) if check.kind == "parameter"}
    assert [one.name for one in checks["after the first update"].differences] == ["large"]
    assert not checks["after the last step"].first
    silent = record(torch.zeros(4), meant)  # no gradient at all moves nothing
    assert first_gradients(silent, TOLERANCE)["small"].rounded is None


def moments(off: float, ways: float) -> RunRecord:
    """Adam's first moment after three gradients of which the third takes back the others, but for a hundredth."""
    first, second = torch.tensor([1.0]), torch.tensor([1.0])
    third = torch.tensor([-0.9 - 0.81 + 0.01])
    last = 0.1 * (0.81 * first + 0.9 * second + third) + off
    return RunRecord(
        steps=[StepRecord(loss=1.0) for _ in range(3)],
        values={moment: {"w": torch.zeros(1)} for moment in (START, FIRST, END)},
        options={"w": {}},
        reduced={0: {"w": first}, 1: {"w": second}, 2: {"w": third}},
        used={0: {"w": first}, 1: {"w": second}, 2: {"w": third}},
        ways={"w": ways} if ways else {},
        state={FIRST: {"w.exp_avg": 0.1 * first}, END: {"w.exp_avg": last}},
    )


def test_a_moment_that_adds_up_to_nearly_nothing_may_be_off_by_what_its_terms_may_be_off_by() -> None:
    def told(off: float, ways: float = 3.7) -> bool:
        pair = Pair(one=moments(0.0, ways), other=moments(off, 0.0), plan=Plan(), tolerance=TOLERANCE)
        checks = {check.when: check for check in judged(pair) if check.kind == "state"}
        return bool(checks["after the last step"].first)

    rounding = 0.1 * 3.7 * TOLERANCE.parameter  # 0.37 beside a moment of 0.001: 370 times its own share
    assert not told(0.9 * rounding)
    assert told(1.1 * rounding)
    assert told(0.9 * rounding, ways=0.0)  # where the terms are not known, the moment's own size counts
