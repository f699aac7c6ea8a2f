"""How far rounding may move what a proof compares, and what the first step of a run is held against."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx as px
from law_rows import in_one_test
from phalanx.config import Plan, RunSpec
from phalanx.launch.first_step import why_unchecked
from phalanx.verify.compare import FirstGradient, Tolerance, parameters
from phalanx.verify.evidence import first_gradients
from phalanx.verify.judge import Pair, judged
from phalanx.verify.record import END, FIRST, START, RunRecord, StepRecord
from phalanx.verify.wandering import fed_by, wandering_means
from phalanx.witness.reference_step import FirstStepOfOne, signed, take_first_step

pytestmark = pytest.mark.quick
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


RATE, STEPS = 0.01, 12


def record_of(**options: object) -> RunRecord:
    steps = [StepRecord(loss=1.0, rates={"0.bias": RATE}) for _ in range(STEPS)]
    return RunRecord(steps=steps, values={START: {}, END: {}}, options={"0.bias": options})


@in_one_test(("betas", "momentum"), [((0.9, 0.999), 0.1), ((0.0, 0.99), None), ((0.95, 0.95), 0.1)])
def test_no_gradients_move_a_running_mean_further(betas: tuple[float, float], momentum: float | None) -> None:
    fed = {"1.running_mean": ["0.bias", momentum]}
    allowed = wandering_means(record_of(betas=betas), ["0.bias"], fed)["1.running_mean"]
    draws, furthest = torch.Generator().manual_seed(0), 0.0
    for way in range(64):
        bias = nn.Parameter(torch.zeros(64))
        optimizer = torch.optim.Adam([bias], lr=RATE, betas=betas, eps=1e-30)
        mean = torch.zeros(64)
        for step in range(STEPS):
            share = 1 / (step + 1) if momentum is None else momentum
            mean = (1 - share) * mean + share * bias.detach()
            size = torch.exp(torch.randn(64, generator=draws) * (way % 8))  # from all alike to a few that are large
            bias.grad = size * (1.0 if way % 2 else torch.randn(64, generator=draws).sign())
            optimizer.step()
        furthest = max(furthest, float(mean.abs().max()))
    assert 2 * furthest <= allowed * (1 + 1e-5)
    assert allowed < 20 * furthest  # and is no bound that nothing reaches


def test_only_the_bias_right_before_it_feeds_a_batch_norm() -> None:
    module = nn.Sequential(
        OrderedDict(
            keys=nn.Linear(8, 8),
            values=nn.Linear(8, 8, bias=False),
            norm=nn.BatchNorm1d(8),
            conv=nn.Conv1d(8, 8, 1),
            act=nn.ReLU(),
            drop=nn.Dropout(),
            after=nn.BatchNorm1d(8, momentum=0.3),
            plain=nn.BatchNorm1d(8, track_running_stats=False),
        )
    )
    assert fed_by(module) == {"after.running_mean": ["conv.bias", 0.3]}


@in_one_test(
    ("plan", "why"),
    [
        ("dp=2", ""),
        ("micro=2 precision=bf16", ""),
        ("device=cpu precision=bf16", "one device"),
        ("dp=2 server=1", "no step"),
        ("dp=2 sync=local every=2", "no step"),
        ("dp=2 compress=int8", "no step"),
        ("dp=2 precision=tf32", "plain loop"),
    ],
)
def test_which_plans_have_a_first_step_to_compare(plan: str, why: str) -> None:
    job: Any = SimpleNamespace(phases=())
    run = RunSpec(job="job.py", plan=Plan.parse(plan), folder=Path("run"))
    assert why in (found := why_unchecked(job, run))
    assert bool(found) == bool(why)


def job_with(model: Callable[[], nn.Module]) -> px.Job:
    columns = {"x": torch.randn(16, 6, generator=torch.Generator().manual_seed(0)), "y": torch.arange(16) % 4}
    return px.Job(
        model=model,
        data=lambda: px.Table(**columns),
        inputs=lambda batch: batch["x"],
        loss=lambda output, batch: px.cross_entropy(output, batch["y"]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=LR),
        batch=16,
        steps=1,
    )


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


def test_of_a_model_that_draws_there_is_no_first_step() -> None:
    taken = list[bool]()
    for last in (nn.Dropout(0.5), Noise()):
        job = job_with(partial(nn.Sequential, nn.Linear(6, 4), last))
        taken.append("without" in take_first_step(job, "fp32", torch.device("cpu"), BytesIO()))
    assert taken == [False, True], "dropout is off, other numbers cannot be had"


@in_one_test(
    ("by", "says"),
    [
        (0.0, ""),
        (5e-6, ""),
        (1e-3, "of weight on rank 1, by 0.000"),
        (float("nan"), "of weight on rank 1, by nan of its norm"),
        (None, "no rank has the {} of weight"),
    ],
)
def test_the_first_step_is_compared_on_every_rank(by: float | None, says: str) -> None:
    """Of two ranks with two rows of the weight each; ``by``: how far off the second is, relatively; none: without."""
    file = BytesIO()
    answer = take_first_step(job_with(lambda: nn.Linear(6, 4)), "fp32", torch.device("cpu"), file)
    one = FirstStepOfOne.read(answer, file, "fp32")
    for kind in ("gradient", "update"):
        weight, bias = (one.tensors[f"{kind}.{name}"] for name in ("weight", "bias"))
        ranks: list[dict[str, Any]] = [{"bias": [(), signed(bias, (), bias.shape)]} for _ in range(2)]
        for rank in range(2) if by is not None else ():
            cuts, part = ((0, ((2 * rank, 2 * rank + 2),)),), weight[2 * rank : 2 * rank + 2] * (1 + rank * (by or 0))
            ranks[rank]["weight"] = [cuts, signed(part, cuts, weight.shape)]
        words, apart, allowed = one.judged(kind, answer["loss"], ranks)
        assert says.format(kind) in words
        assert bool(words) == bool(says)
        assert says or (by or 0) / 4 <= apart <= 1e-5 <= allowed < (1e-4 if kind == "gradient" else 1)
        assert "its loss is" in one.judged(kind, answer["loss"] * 1.001, ranks)[0]
