"""Rules of the planner that no recommended plan shows by itself, and what it recommends: some of it is run here.

``make recommended`` runs all of it; its page is judged here.
"""

from __future__ import annotations

import json
from dataclasses import fields
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from settings import AXES, MOST_AXES, SETTINGS, STEPS, small_config, small_job, small_plans
from small_profiles import transformer
from write_recommended import RESULTS, good, recommended

from law_rows import longer
from phalanx.config import Plan
from phalanx.forecast import Work, forecast
from phalanx.forecast.uncertainty import SAFE
from phalanx.hardware import cluster
from phalanx.planner import Question
from phalanx.planner.rank import _first
from phalanx.planner.scale import scale
from phalanx.planner.search import search, space
from phalanx.preflight import plan_choice
from phalanx.verify import OneDevice


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
    best = _first(asked, found)[0]
    assert best.plan.mesh == poor.mesh
    assert best.step < forecast(asked.work, poor, asked.cluster).step


def test_plain_replicas_are_as_many_as_samples_and_accelerators_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, batch, replicas in ((8, 64, 8), (8, 3, 3), (0, 64, 1)):
        monkeypatch.setattr(plan_choice, "accelerator_count", lambda count=count: count)
        assert plan_choice.plain_replicas(batch) == Plan(dp=replicas)


STORED = json.loads(RESULTS.read_text())["settings"]
BY_NAME = {setting.name: setting for setting in SETTINGS}


def test_every_recommended_plan_was_run_as_the_rules_of_small_size_have_it_and_is_equal() -> None:
    for name, found in STORED.items():
        assert found["asked"] == list(BY_NAME[name].asked), name
        assert [row for row in found["rows"] if not good(row)] == [], name
        for row in found["rows"]:
            small = small_plans(Plan.parse(row["plan"]), BY_NAME[name].batch)
            assert {str(one) for one in small} <= {one["plan"] for one in row["small"]}, name


def test_small_size_keeps_every_key_and_every_three_axes() -> None:
    text = "dp=4 fsdp=2 tp=4 pp=32 schedule=interleaved stages=4 sequence=true zero=1 micro=1 precision=bf16"
    plan = Plan.parse(f"{text} recompute=full")
    each = small_plans(plan, batch=2048)
    assert len(each) == 4
    for one in each:
        assert one.world_size == 2**MOST_AXES
    for field in fields(Plan):
        wanted = getattr(plan, field.name)
        if field.name not in (*AXES, "micro", "precision"):
            assert any(getattr(one, field.name) == wanted for one in each), field.name
    (one,) = small_plans(Plan.parse("fsdp=8 zero=1 micro=32"), batch=512)
    assert one == Plan(fsdp=2, zero=1, micro=4)  # 2 micro-batches, as it has
    (one,) = small_plans(Plan.parse("pp=8 micro=1"), batch=64)
    assert one == Plan(pp=2, micro=4)  # 4 of its 64


@cache
def one_device(name: str, text: str) -> OneDevice:
    job = small_job(json.loads(text))
    job.model()  # loads the model's code, which takes seconds, here and not in each worker
    return OneDevice.run(job, STEPS)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        *longer(("Llama 70B, 8 servers", "tp=2 pp=2 sequence=true micro=2 recompute=full")),
        *longer(("Llama 8B, 128k tokens", "tp=2 cp=2 micro=4 recompute=full")),
        ("Mixtral 8x7B, 4 servers", "pp=2 ep=2 schedule=zero-bubble micro=2 recompute=selective"),
    ],
)
def test_some_of_them_are_equal(name: str, plan: str) -> None:
    chosen = Plan.parse(plan)
    proof = one_device(name, json.dumps(small_config(BY_NAME[name].config, chosen))).prove(chosen)
    assert proof.equal, f"{proof.first}\n{proof.cause}"


def test_the_command_recommends_what_was_run() -> None:
    """Where forecasts change, ``make recommended`` has to be run again."""
    setting = BY_NAME["GPT-2 small, processors"]
    stored: list[Any] = [(row["place"], row["plan"]) for row in STORED[setting.name]["rows"]]
    assert [(row["place"], row["plan"]) for row in recommended(setting)] == stored
