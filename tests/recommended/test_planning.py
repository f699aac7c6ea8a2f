"""Rules of the planner that no recommended plan shows by itself: margins, nodes, gains, and faster neighbours."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.config import Plan
from phalanx.forecast import Work, forecast
from phalanx.forecast.uncertainty import SAFE
from phalanx.hardware import cluster
from phalanx.planner import Question
from phalanx.planner.rank import _first
from phalanx.planner.scale import scale
from phalanx.planner.search import search, space
from phalanx.preflight import first_proof, plan_choice

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
from small_profiles import transformer


def question(text: str, batch: int, **shape: int) -> Question:
    return Question(work=Work(profile=transformer(**shape), batch=batch), cluster=cluster(text), precision="bf16")


def test_every_plan_that_is_ranked_leaves_a_margin_where_one_does() -> None:
    asked = question("8xA100-40GB", 16, layers=12, width=5120, heads=40)
    found = search(asked)
    assert 0 < found.safe < found.fitting
    assert found.reserved.max() <= SAFE * asked.cluster.groups[0].device.room


def test_a_tp_group_stays_inside_a_node() -> None:
    found = space(question("4x2xA100", 32, layers=4, heads=8))
    assert found.columns["tp"].max() == 2


def test_the_gain_of_a_point_is_over_the_point_before() -> None:
    points = scale(question("A100", 16, layers=4), 8).points
    assert len(points) == 4
    assert points[0].gain == 0
    for before, after in pairwise(points):
        assert after.gain == pytest.approx(before.forecast.step / after.forecast.step - 1)


def test_a_faster_neighbour_takes_the_place_of_the_first() -> None:
    asked = question("8xA100-80GB", 64, layers=4)
    poor = Plan(dp=8, micro=1, precision="bf16")
    found: Any = SimpleNamespace(by_mesh=lambda most: [poor])
    best = _first(asked, found, 1)[0]
    assert best.plan.mesh == poor.mesh
    assert best.step < forecast(asked.work, poor, asked.cluster).step


def test_plain_replicas_are_as_many_as_samples_and_accelerators_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, batch, replicas in ((8, 64, 8), (8, 3, 3), (0, 64, 1)):
        monkeypatch.setattr(plan_choice, "accelerator_count", lambda count=count: count)
        assert plan_choice.plain_replicas(batch) == Plan(dp=replicas)


def test_a_proof_is_kept_where_it_is_equal_and_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(first_proof, "_keep", lambda job, proof, ground: kept.append((proof.equal, proof.steps)))
    for shipped, equal, steps in ((False, True, 3), (False, True, 2), (False, False, 3), (True, True, 3)):
        monkeypatch.setattr(first_proof, "ships_proven", lambda kind, shipped=shipped: shipped)
        proof: Any = SimpleNamespace(plan=Plan(dp=2, device="cpu"), equal=equal, steps=steps)
        job: Any = None
        first_proof.remember_proof(job, proof)
    assert kept == [(True, 3)]
