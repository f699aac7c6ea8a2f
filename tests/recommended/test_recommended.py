"""What ``plan`` recommends runs: some of it here, all of it by ``make recommended``, whose page is judged here."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import cache
from typing import Any

import pytest
from settings import AXES, MOST_AXES, SETTINGS, STEPS, small_config, small_job, small_plans
from write_recommended import RESULTS, good, recommended

from longer import longer
from phalanx.config import Plan
from phalanx.verify import OneDevice

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
