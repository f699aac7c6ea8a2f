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
