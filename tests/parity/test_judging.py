"""Judge records that are written by hand: equal ones pass, and each single change of one is found and named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.config import Plan
from phalanx.verify.compare import Bounds, Way, difference, gradients, parameters, relative_difference, values
from phalanx.verify.judge import Pair, judged
from phalanx.verify.record import AVERAGE, END, FIRST, START, Copy, RankRecord, RunRecord, StepRecord

BOUNDS = Bounds()


def tensor(*numbers: float) -> Tensor:
    return torch.tensor(numbers)


def copies(value: str = "same") -> dict[str, dict[str, Copy]]:
    """Digests of one parameter, its gradient and its moment, at the moments that a proof looks at."""
    held = {START: "value.w", "reduced-0": "gradient.w", "used-0": "gradient.w", FIRST: "state.w.exp_avg"}
    return {moment: {key: Copy(piece=(), digest=value)} for moment, key in (*held.items(), (END, "value.w"))}


def record(ranks: int = 2) -> RunRecord:
    """Two steps of a job with one trained parameter, one frozen, a buffer, a moment, an evaluation and a checkpoint."""
    steps = [StepRecord(loss=2.0 - step, count=16.0, samples=16, norm=3.0, rates={"w": 0.1}) for step in range(2)]
    evaluation = {2: {"loss": 0.5, "samples": 16, "metrics": {"accuracy": 0.75}}}
    told = [RankRecord(steps=list(steps), copies=copies(), evaluations=evaluation) for _ in range(ranks)]
    moments = ((START, 1.0), (FIRST, 0.9), (END, 0.8))
    end = {"model.w": tensor(0.8, 1.6, -2.4), "model.still": tensor(5.0), "model.seen": tensor(4.0)}
    end |= {
        "optimizer.w.exp_avg": tensor(0.2, 0.1, 0.3),
        "optimizer.w.exp_avg_sq": tensor(0.1, 0.4, 0.4),
        "optimizer.w.step": tensor(2.0),
        "progress.step": tensor(2.0),
    }
    return RunRecord(
        steps=steps,
        values={moment: {"w": size * tensor(1.0, 2.0, -3.0), "still": tensor(5.0)} for moment, size in moments},
        reduced={step: {"w": tensor(1.0, 2.0, -2.0)} for step in range(2)},
        used={step: {"w": tensor(1.0, 2.0, -2.0)} for step in range(2)},
        buffers={moment: {"seen": tensor(4.0)} for moment in (START, FIRST, END)},
        state={
            moment: {"w.exp_avg": tensor(0.2, 0.1, 0.3), "w.exp_avg_sq": tensor(0.1, 0.4, 0.4)}
            for moment in (FIRST, END)
        },
        numbers={FIRST: {"w.step": 1.0}, END: {"w.step": 2.0}},
        options={"w": {"weight_decay": 0.01}},
        evaluations=evaluation,
        saved=dict(end),
        loaded=dict(end),
        ranks=told,
    )


def at(field: str, moment: Any, name: str, value: Any) -> Callable[[RunRecord], RunRecord]:
    """Put ``value`` in place of one entry of a field; ``None`` takes the entry out."""

    def change(one: RunRecord) -> RunRecord:
        whole = {key: dict(inner) for key, inner in getattr(one, field).items()}
        whole[moment][name] = value
        if value is None:
            del whole[moment][name]
        return replace(one, **{field: whole})

    return change


def in_step(step: int, **how: Any) -> Callable[[RunRecord], RunRecord]:
    def changed(steps: list[StepRecord]) -> list[StepRecord]:
        return [replace(one, **how) if index == step else one for index, one in enumerate(steps)]

    def change(one: RunRecord) -> RunRecord:
        return replace(
            one, steps=changed(one.steps), ranks=[replace(rank, steps=changed(rank.steps)) for rank in one.ranks]
        )

    return change


def on_rank_1(**how: Any) -> Callable[[RunRecord], RunRecord]:
    return lambda one: replace(one, ranks=[one.ranks[0], replace(one.ranks[1], **how)])


def copy_of(moment: str) -> Callable[[RunRecord], RunRecord]:
    return on_rank_1(copies=copies() | {moment: copies("other")[moment]})


def kept(field: str, name: str, value: Tensor | None) -> Callable[[RunRecord], RunRecord]:
    def change(one: RunRecord) -> RunRecord:
        there = {key: tensor for key, tensor in getattr(one, field).items() if key != name}
        return replace(one, **{field: there | ({} if value is None else {name: value})})

    return change


NAN = math.nan
W, G = tensor(1.0, 2.0, -3.0), tensor(1.0, 2.0, -2.0)
OTHER_LOSS = {2: {"loss": 0.6, "samples": 16, "metrics": {"accuracy": 0.75}}}
CHANGES: dict[str, tuple[Callable[[RunRecord], RunRecord], str, str]] = {
    "initial value": (at("values", START, "w", 1.1 * W), "initial", "w"),
    "initial buffer": (at("buffers", START, "seen", tensor(4.1)), "initial", "seen"),
    "option": (at("options", "w", "weight_decay", 0.02), "exact", "weight_decay"),
    "loss of a later step": (in_step(1, loss=1.1), "loss", "step 1"),
    "loss that is no number": (in_step(1, loss=NAN), "loss", "step 1"),
    "count": (in_step(0, count=15.0), "exact", "count"),
    "samples": (in_step(1, samples=15), "exact", "samples"),
    "norm": (in_step(0, norm=3.3), "exact", "norm"),
    "skipped update": (in_step(1, skipped=True), "exact", "skipped"),
    "rate": (in_step(1, rates={"w": 0.11}), "exact", "learning rate"),
    "gradients twice": (at("reduced", 0, "w", 2 * G), "scale", "step 0"),
    "gradient turned": (at("reduced", 0, "w", tensor(1.02, 1.99, -2.0)), "gradient", "w"),
    "gradient that is missing": (at("reduced", 0, "w", None), "scale", "step 0"),
    "gradient that is no number": (at("reduced", 0, "w", tensor(NAN, 2.0, -2.0)), "scale", "step 0"),
    "gradient given to the optimizer": (at("used", 1, "w", tensor(1.02, 1.99, -2.0)), "used", "step 1"),
    "parameter after the first update": (at("values", FIRST, "w", tensor(0.9, 1.9, -2.7)), "parameter", "first update"),
    "parameter after the last step": (at("values", END, "w", tensor(0.8, 1.7, -2.4)), "parameter", "last step"),
    "parameter that is missing": (at("values", END, "w", None), "parameter", "w"),
    "frozen parameter": (at("values", END, "still", tensor(5.1)), "parameter", "still"),
    "buffer": (at("buffers", END, "seen", tensor(4.1)), "buffer", "seen"),
    "moment": (at("state", END, "w.exp_avg", tensor(0.2, 0.2, 0.3)), "state", "exp_avg"),
    "moment that is missing": (at("state", FIRST, "w.exp_avg", None), "state", "exp_avg"),
    "count of steps": (at("numbers", END, "w.step", 3.0), "exact", "step"),
    "copy of a start value": (copy_of(START), "copies", "ranks 0 and 1"),
    "copy of a gradient": (copy_of("reduced-0"), "copies", "gradient of w"),
    "copy of a clipped gradient": (copy_of("used-0"), "copies", "gradient of w"),
    "copy of a moment": (copy_of(FIRST), "copies", "exp_avg"),
    "copy of an end value": (copy_of(END), "copies", "last step"),
    "copy on another thread": (
        on_rank_1(copies=copies() | {END: {"value.w": Copy(piece=(), digest="same", differs_by=(0.0, 0.1))}}),
        "copies",
        "threads 0 and 2",
    ),
    "loss that another rank tells": (on_rank_1(steps=in_step(1, loss=1.1)(record()).ranks[1].steps), "exact", "rank 1"),
    "number that another rank tells": (
        lambda one: replace(
            one, ranks=[replace(rank, numbers={END: {"w.step": 2.0 + at}}) for at, rank in enumerate(one.ranks)]
        ),
        "exact",
        "w.step",
    ),
    "evaluation that another rank tells": (on_rank_1(evaluations=OTHER_LOSS), "exact", "evaluation"),
    "evaluation": (lambda one: replace(one, evaluations=OTHER_LOSS), "evaluation", "loss"),
    "samples of an evaluation": (at("evaluations", 2, "samples", 15), "evaluation", "samples"),
    "metric": (at("evaluations", 2, "metrics", {"accuracy": 0.5}), "evaluation", "accuracy"),
    "evaluation that is missing": (lambda one: replace(one, evaluations={}), "evaluation", "loss"),
    "saved parameter": (kept("saved", "model.w", 0.81 * W), "checkpoint", "model.w"),
    "parameter that is not saved": (kept("saved", "model.still", None), "checkpoint", "model.still"),
    "moment that is not saved": (kept("saved", "optimizer.w.exp_avg", None), "checkpoint", "exp_avg"),
    "loaded parameter": (kept("loaded", "model.w", 0.81 * W), "checkpoint", "model.w"),
    "loaded count of steps": (kept("loaded", "progress.step", tensor(1.0)), "checkpoint", "progress.step"),
    "loaded count that is missing": (kept("loaded", "optimizer.w.step", None), "checkpoint", "w.step"),
}


def found(other: RunRecord, one: RunRecord | None = None) -> list[Any]:
    pair = Pair(one=one or replace(record(), ranks=[]), other=other, plan=Plan.parse("dp=2"), bounds=BOUNDS)
    return [check for check in judged(pair) if check.first]


def test_equal_records_pass_and_everything_in_them_is_compared() -> None:
    pair = Pair(one=record(ranks=0), other=record(), plan=Plan.parse("dp=2"), bounds=BOUNDS)
    checks = judged(pair)
    assert [check.first for check in checks if check.first] == []
    kinds = {"initial", "loss", "scale", "gradient", "used", "parameter", "buffer", "state", "copies", "exact"}
    assert {check.kind for check in checks} == kinds | {"evaluation", "checkpoint"}
    assert sum(check.many for check in checks if check.kind == "copies") == 5


@pytest.mark.parametrize("name", CHANGES)
def test_one_change_is_found_and_named(name: str) -> None:
    change, kind, words = CHANGES[name]
    first = found(change(record()))[0]
    assert first.kind == kind, first
    assert words in first.first


def test_an_average_is_held_against_its_own_way() -> None:
    averaged = at("values", AVERAGE, "w", 0.9 * W)
    one, right = (averaged(replace(each, values={**each.values, AVERAGE: {}})) for each in (record(0), record()))
    assert found(right, one) == []
    (wrong,) = found(at("values", AVERAGE, "w", tensor(0.9, 1.9, -2.7))(right), one)
    assert wrong.kind == "average"
    assert "in the average" in wrong.first


class TestCompared:
    def test_rounding_passes_and_more_does_not(self) -> None:
        def beyond(times: float, noise: float = 0.0) -> bool:
            bounds = Bounds(noise={"reduced|0|w": noise})
            (one,) = gradients({"w": G}, {"w": G + times * 1e-5 * tensor(2.0, -1.0, 2.0)}, bounds, "reduced|0")
            return one.beyond

        assert not beyond(0.9)
        assert beyond(1.1)
        assert not beyond(1.1, noise=1e-6)

    def test_what_is_there_on_one_side_only_is_beyond(self) -> None:
        for pair in (({"w": W}, {}), ({}, {"w": W})):
            assert [one.beyond for one in values(*pair)] == [True]
            assert [one.beyond for one in gradients(*pair, BOUNDS, "reduced|0")] == [True]

    def test_a_gradient_of_rounding_alone_is_named(self) -> None:
        found = gradients({"w": G, "b": 1e-9 * G}, {"w": G, "b": -1e-9 * G}, BOUNDS, "reduced|0")
        assert [(one.name, one.rounding, one.beyond) for one in found] == [("w", False, False), ("b", True, False)]

    def test_numbers_other_shapes_and_no_numbers(self) -> None:
        assert relative_difference(NAN, NAN) == relative_difference(math.inf, math.inf) == 0.0
        assert relative_difference(2.0, 3.0) == relative_difference(2.0, 1.0) == 0.5
        assert math.isnan(relative_difference(1.0, NAN))
        assert difference("w", W, W[:2], 1.0, 9.0).beyond
        assert difference("w", W, tensor(NAN, 2.0, -3.0), 1.0, 9.0).beyond
        factor = difference("w", W, 1.5 * W, 1.0, 0.0)
        assert (factor.ratio, factor.residual) == (pytest.approx(1.5), pytest.approx(0.0, abs=1e-6))

    def test_a_parameter_is_off_by_a_share_of_its_way(self) -> None:
        start, end = {"w": W}, {"w": W - 1e-1 * G}
        way = Way(start=start, moved=end, first={"w": (G, 0.0)}, moment=END)
        (one,) = parameters(end, {"w": W - 1.01e-1 * G}, way, BOUNDS)
        assert one.beyond
        assert one.relative == pytest.approx(0.01, rel=1e-2)
        (one,) = parameters(end, {"w": W - (1 + 5e-6) * 1e-1 * G}, way, BOUNDS)
        assert not one.beyond
