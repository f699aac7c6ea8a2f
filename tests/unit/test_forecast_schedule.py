"""Pipelines as events: against the orders that run, against published formulas, against the closed form."""

from __future__ import annotations

import random
from importlib import import_module

import numpy as np
import pytest

from phalanx.config import Plan
from phalanx.forecast.layouts import SCHEDULES, Layouts
from phalanx.forecast.pipeline import Lanes, PipelineTimes, duration, pipeline, simulated
from phalanx.placement.schedules import bubble, order, timed

CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 2, "zbv": 2, "dualpipev": 2}


def unit(schedule: str, ranks: int, micros: int, chunks: int | None = None) -> PipelineTimes:
    """Every stage takes 1 forward, 1 backward for inputs and 1 for weights."""
    stages = chunks or CHUNKS[schedule]
    each = (float(stages),) * ranks
    times = {"forward": each, "inputs": each, "weights": each}
    return PipelineTimes(schedule=schedule, ranks=ranks, chunks=stages, micros=micros, **times)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("ranks", "micros"), [(2, 4), (3, 9), (4, 8), (4, 16)])
def test_events_take_as_long_as_the_order_that_runs(schedule: str, ranks: int, micros: int) -> None:
    run = order(schedule, ranks, CHUNKS[schedule], micros)  # type: ignore[arg-type]
    ends = max(one.end for one in timed(run))
    found = duration(unit(schedule, ranks, micros))
    assert found == ends
    busy = 3.0 * CHUNKS[schedule] * micros
    if schedule != "zero-bubble":
        assert bubble(run) == pytest.approx(1 - busy / found)


@pytest.mark.parametrize(("ranks", "micros"), [(2, 8), (4, 8), (8, 16)])
def test_bubbles_of_the_papers(ranks: int, micros: int) -> None:
    """Narayanan et al. 2021, section 2.2: (p - 1)(f + b), with v chunks a v-th of it; zero bubble: Qi et al. 2024."""
    ideal, whole = 3.0 * micros, 3.0 * (ranks - 1)
    for schedule in ("gpipe", "1f1b"):
        assert duration(unit(schedule, ranks, micros)) == pytest.approx(ideal + whole)
    for chunks in (2, 4):
        found = duration(unit("interleaved", ranks, micros, chunks))
        assert found / chunks == pytest.approx(ideal + whole / chunks)
    assert duration(unit("zero-bubble", ranks, micros, 1)) == pytest.approx(ideal + ranks - 1)
    assert duration(unit("zbv", ranks, micros)) / 2 < ideal + whole / 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_extrapolated_is_what_would_be_run(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("phalanx.forecast.pipeline")
    draw = random.Random(7)
    chunks = CHUNKS[schedule]

    def times() -> tuple[float, ...]:
        return tuple(chunks * draw.uniform(0.9, 1.1) for _ in range(3))

    forward, inputs, weights = times(), times(), times()
    long = PipelineTimes(
        schedule=schedule, ranks=3, chunks=chunks, micros=60, forward=forward, inputs=inputs, weights=weights
    )
    short = duration(long)
    duration.cache_clear()
    monkeypatch.setattr(module, "_FEW", 1000)
    assert short == pytest.approx(duration(long), rel=0.01)
    duration.cache_clear()


def test_a_slow_rank_sets_the_pace() -> None:
    slow = PipelineTimes(
        schedule="1f1b", ranks=3, chunks=1, micros=30, forward=(1, 2, 1), inputs=(1, 2, 1), weights=(1, 2, 1)
    )
    assert 30 * 6 <= duration(slow) <= 30 * 6 + 2 * 3 * 2


@pytest.mark.parametrize(("schedule", "most"), [("gpipe", 0.001), ("1f1b", 0.02), ("interleaved", 0.02)])
def test_the_closed_form_is_as_the_events(schedule: str, most: float) -> None:
    differences = _differences(schedule)
    assert np.mean(np.abs(differences)) <= most
    assert min(differences) >= -0.001  # it never says too little
    assert max(differences) <= 0.07


@pytest.mark.parametrize("schedule", ["zero-bubble", "zbv", "dualpipev"])
def test_the_closed_form_of_zero_bubble_is_near(schedule: str) -> None:
    differences = _differences(schedule)
    assert np.mean(np.abs(differences)) <= 0.025
    assert max(np.abs(differences)) <= 0.07


def _differences(schedule: str) -> list[float]:
    """Closed form over events, less 1, for random times of stages that differ by up to a fifth."""
    draw, found = random.Random(3), list[float]()
    for _ in range(30):
        ranks = draw.choice([2, 4, 8])
        stages = f" stages={CHUNKS[schedule]}" if CHUNKS[schedule] > 1 and schedule != "zero-bubble" else ""
        plan = Plan.parse(f"pp={ranks} schedule={schedule}{stages} micro=1")
        layouts = Layouts.of([plan], ranks * draw.choice([2, 4, 8]), 128)
        forward = np.array([[draw.uniform(0.9, 1.1)] for _ in range(3)])
        there = np.array([[1.0], [ranks - 2.0], [1.0]])
        lanes = Lanes(forward=forward + 0.02, backward=2 * forward + 0.02, weights=forward, there=there)
        found.append(float(pipeline(lanes, layouts)[0] / simulated(lanes, layouts)[0] - 1))
    return found
