"""Readers of placement say the same of one plan: what is priced is what is listed, and how often a rank computes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_profiles import transformer

import phalanx as px
from in_one_test import in_one_test
from phalanx.config import Cluster, Plan
from phalanx.data import Lane
from phalanx.demo.jobs import gpt
from phalanx.forecast import PHALANX, Work, forecast
from phalanx.forecast.kernels import widths
from phalanx.forecast.layouts import Layouts
from phalanx.hardware import cluster
from phalanx.placement.batch_split import cuts
from phalanx.placement.collective_bytes import Exchange, MeshSizes
from phalanx.placement.step_traffic import step_traffic
from phalanx.report.show import planned

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send")
WORK = Work(profile=transformer(layers=4, width=64, heads=4, vocabulary=100), batch=16, norm=True)
UNPRICED = {"the loss and its count", "replicas' fingerprints"}  # in what every step takes at least
PLANS = (
    "dp=2",
    "dp=4 micro=2",
    "fsdp=2 zero=1 micro=2",
    "fsdp=2 micro=2",
    "dp=2 fsdp=2 zero=2 micro=2",
    "fsdp=2 zero=1 precision=fp16",
    "tp=2 micro=4",
    "tp=2 sequence=true recompute=selective precision=bf16",
    "cp=2 micro=4",
    "cp=2 attention=alltoall recompute=selective",
    "fsdp=2 tp=2 zero=1 sequence=true",
    "fsdp=2 cp=2 zero=2 micro=2",
    "cp=2 tp=2 recompute=full",
    "dp=2 ep=2",
)


def per_byte(kind: str, devices: int = 8) -> Cluster:
    """GPUs on which each byte of an exchange of this ``kind`` takes a second, and no other exchange any time."""
    lines = {f"{one}.{ranks}.{end}": 0.0 for one in KINDS for ranks in (2, 4) for end in ("start", "byte")}
    lines |= {f"{kind}.{ranks}.byte": 1.0 for ranks in (2, 4)}
    known = cluster(f"{devices}xA100")
    group = known.groups[0]
    device = replace(group.device, measured={**group.device.measured, **lines})
    return replace(known, groups=(replace(group, device=device),))


def listed(plan: Plan, kind: str, rank: int) -> float:
    """Bytes of all exchanges of that kind; a ring takes what a gather does."""
    wide = widths(PHALANX, plan.precision, np.array(float(plan.zero)))

    def bytes_of(one: Exchange) -> float:
        there = {"ring": "all-gather"}.get(one.kind, one.kind) == kind and one.why not in UNPRICED
        return float(one.size * one.times) if there else 0.0

    return sum(bytes_of(one) for one in step_traffic(WORK.profile, plan, WORK.batch, rank, wide))


@in_one_test("text", PLANS)
def test_all_that_is_listed_is_priced_and_nothing_else(text: str) -> None:
    plan = Plan.parse(text)
    for kind in KINDS:
        priced = forecast(WORK, plan, per_byte(kind)).seconds
        assert priced["exchange"] + priced["replicas"] == pytest.approx(listed(plan, kind, 0), rel=1e-3, abs=0.1), kind


@in_one_test("text", ["pp=2 fsdp=2 micro=2", "pp=2 fsdp=2 micro=2 schedule=zbv", "pp=2 fsdp=2 zero=1 micro=2"])
def test_of_a_pipeline_what_the_rank_sends_that_sends_most(text: str) -> None:
    plan = Plan.parse(text)
    for kind in ("all-gather", "reduce-scatter"):
        most = max(listed(plan, kind, rank) for rank in range(plan.world_size))
        assert forecast(WORK, plan, per_byte(kind)).seconds["replicas"] == pytest.approx(most, rel=1e-3, abs=0.1)


@in_one_test(("precision", "norm", "priced"), [("fp32", False, False), ("fp32", True, True), ("fp16", False, True)])
def test_a_norm_is_priced_where_a_step_takes_one(precision: str, norm: bool, priced: bool) -> None:
    plan = Plan.parse(f"fsdp=2 precision={precision}")
    found = forecast(replace(WORK, norm=norm), plan, per_byte("all-reduce")).seconds["replicas"]
    assert found == pytest.approx(listed(plan, "all-reduce", 0) if priced else 0.0, abs=0.1)


@in_one_test(
    "text",
    [
        "micro=7",
        "dp=3",
        "dp=3 micro=2",
        "dp=2 fsdp=2 micro=3",
        "threads=3 micro=2",
        "ep=2 micro=2",
        "pp=2 micro=4",
        "dp=2 pp=3 micro=2",
        "dp=2 pp=2 tp=2",
    ],
)
def test_micro_batches_are_as_many_for_all(text: str) -> None:
    plan = Plan.parse(text)
    for batch in range(plan.replicas, 30):
        run = {len(part) for rank in range(plan.world_size) for part in cuts(batch, Lane.of(plan, rank), plan.micro)}
        assert len(run) == 1
        counts = {int(Layouts.of([plan], batch, 8).micros[0]), MeshSizes.of(plan, batch).micros}
        drawn = planned(plan, batch, None)
        assert counts | ({drawn.micros} if drawn else set()) == run, batch


def test_the_norm_that_every_step_looks_at_is_in_its_forecast() -> None:
    """Also where nothing is clipped."""
    job = replace(gpt.gpt_job(layers=2, width=24, heads=4, context=12, batch=8, steps=1), clip=None)
    found = px.forecast(job, "fsdp=2", per_byte("all-reduce", devices=2))
    assert found.seconds["replicas"] > 1
