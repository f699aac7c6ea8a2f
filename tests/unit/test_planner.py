"""Enumeration, pruning and ranking: complete, valid, and the same as pricing each plan by itself."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from small_profiles import LARGE, transformer

from phalanx.forecast import Work, forecast
from phalanx.forecast.forecast import sweep
from phalanx.hardware import cluster
from phalanx.planner import Goal, Prices, Question, rank
from phalanx.planner.clusters import doublings, precision_for, resized
from phalanx.planner.rules import problems
from phalanx.planner.search import search
from phalanx.planner.space import MESH, space
from phalanx.spec import Plan


def question(text: str = "8xA100-80GB", batch: int = 32, steps: int = 0, **shape: int) -> Question:
    there = cluster(text)
    work = Work(profile=transformer(**shape), batch=batch)
    return Question(work=work, cluster=there, precision=precision_for(there), steps=steps)


def plans(asked: Question) -> list[Plan]:
    found = space(asked)
    return [found.plan(index) for index in range(len(found))]


@pytest.mark.parametrize(("text", "batch"), [("A100", 4), ("6xA100", 7), ("8xA100", 32), ("2x8xV100", 8), ("4xcpu", 3)])
def test_every_plan_multiplies_out_and_can_be_run(text: str, batch: int) -> None:
    asked = question(text, batch, layers=6)
    made = plans(asked)
    assert len(set(made)) == len(made) > 0
    for plan in made:
        assert plan.devices == asked.cluster.devices
        assert Plan.parse(str(plan)) == plan
        assert problems(plan, asked.work, asked.cluster) == []


def test_no_mesh_is_left_out() -> None:
    asked = question("8xA100", 32, layers=4, heads=4)
    found = {tuple(getattr(plan, name) for name in MESH) for plan in plans(asked)}
    sizes = (1, 2, 4, 8)
    wanted = {
        (dp, fsdp, tp, pp, cp, 1)
        for dp, fsdp, tp, pp, cp in product(sizes, repeat=5)
        if dp * fsdp * tp * pp * cp == 8 and tp <= 4 and pp <= 4 and 512 // cp >= 128
    }
    assert found == wanted


def test_every_choice_of_a_key_is_there() -> None:
    made = plans(question("8xA100", 32))
    assert {plan.zero for plan in made} == {0, 1, 2, 3}
    assert {plan.recompute for plan in made} == {"none", "selective", "full"}
    assert {plan.schedule for plan in made} == {"1f1b", "interleaved", "zero-bubble", "zbv"}
    assert {plan.micro for plan in made if plan.dp == 8} == {1, 2, None}
    assert not any(plan.zero == 2 and plan.pp > 1 for plan in made)


def test_heads_blocks_and_samples_bound_the_mesh() -> None:
    made = plans(question("8xA100", 2, layers=3, heads=2))
    assert max(plan.tp for plan in made) == 2
    assert max(plan.pp * plan.stages for plan in made if plan.pp > 1) <= 3
    assert max(plan.replicas for plan in made) == 2


def test_experts_are_shared_out_where_there_are_any() -> None:
    asked = question("8xA100", 32)
    assert {plan.ep for plan in plans(asked)} == {1}
    profile = replace(asked.work.profile, experts=4)
    mixture = replace(asked, work=replace(asked.work, profile=profile))
    assert {plan.ep for plan in plans(mixture)} == {1, 2, 4}


def test_arrays_give_what_each_plan_gives_by_itself() -> None:
    asked = question("8xA100-40GB", 16, layers=4, width=4096, heads=32)
    found = search(asked)
    some = np.linspace(0, len(found.space) - 1, 25).astype(int)
    made = [found.space.plan(int(index)) for index in some]
    alone = sweep(asked.work, made, asked.cluster)
    whole = [place for place, plan in enumerate(made) if plan.pp == 1]  # pipelines are priced by a formula first
    assert found.seconds[some][whole] == pytest.approx(alone.step.total[whole])
    assert found.seconds[some] == pytest.approx(alone.step.total, rel=0.1)
    assert found.reserved[some] == pytest.approx(alone.memory.reserved)


def test_the_first_is_the_fastest_of_all_that_fit() -> None:
    asked = question("8xA100-40GB", 16, layers=12, width=5120, heads=40)
    found = rank(asked)
    assert found.best is not None
    each = sweep(asked.work, plans(asked), asked.cluster)
    fits = each.fits > 0
    assert 0 < fits.sum() < len(fits)
    assert found.best.fits
    assert found.best.step == pytest.approx(each.step.total[fits].min(), rel=1e-3)
    assert (found.search.considered, found.search.fitting) == (len(fits), fits.sum())


def test_plans_told_of_are_in_order_and_of_unlike_meshes() -> None:
    found = rank(question())
    steps = [one.step for one in found.plans]
    assert steps == sorted(steps)
    assert len({tuple(one.plan.mesh.values()) for one in found.plans}) == len(steps) == 6


def test_nothing_is_computed_again_that_fits_without() -> None:
    asked = question("8xA100-40GB", 64, layers=12, width=5120, heads=40)
    found = search(asked)
    again = [index for index in range(len(found.space)) if found.space.columns["recompute"][index] == 2]
    assert again
    for index in again[:10]:
        plan = found.space.plan(index)
        lesser = Plan.parse(str(plan).replace("recompute=full", "recompute=selective"))
        assert not forecast(asked.work, lesser, asked.cluster).fits


def test_held_keys_are_held() -> None:
    found = search(question(), {"tp": 2, "recompute": "full"})
    some = [found.space.plan(index) for index in range(len(found.space))]
    assert some
    assert {(plan.tp, plan.recompute) for plan in some} == {(2, "full")}


def test_a_model_too_small_for_many_is_told_of_one() -> None:
    found = rank(question(batch=8, layers=2, width=64, heads=2, vocabulary=100, length=128))
    assert found.fewer is not None
    assert found.fewer.devices == 1
    assert found.points[0].forecast.step <= min(one.forecast.step for one in found.points)


@pytest.mark.parametrize("by", ["cost", "devices"])
def test_other_goals_choose_other_numbers_of_devices(by: str) -> None:
    asked = question("16xA100", 64, steps=1000, layers=24, width=2048)
    fastest = rank(asked)
    assert fastest.bill is not None
    goal = Goal(by=by, deadline=3 * fastest.bill.seconds)  # type: ignore[arg-type]
    found = rank(asked, goal)
    assert found.met
    assert found.bill is not None
    within = [one for one in found.points if one.bill.seconds <= goal.deadline]
    if by == "cost":
        assert found.bill.device_hours == pytest.approx(min(one.bill.device_hours for one in within))
    else:
        assert found.question.cluster.devices == min(one.devices for one in within) < 16


def test_bounds_that_cannot_be_met_say_so() -> None:
    asked = question("8xA100", 32, steps=1000)
    assert not rank(asked, Goal(by="devices", deadline=1e-3)).met
    assert not rank(asked, Goal(budget=1e-9)).met
    assert rank(asked, Goal(budget=1e9)).met


def test_mixed_clusters_are_planned_so_that_like_devices_share_a_model() -> None:
    asked = question("4xA100+4xV100-32GB", 32)
    assert asked.precision == "fp16"
    inner = {plan.tp * plan.cp * plan.ep * plan.fsdp for plan in plans(asked)}
    assert max(inner) == 4
    assert rank(asked).best is not None


def test_larger_than_one_node_fills_nodes() -> None:
    there = cluster("H100")
    sizes = [(one.nodes, one.groups[0].per_node) for count in (1, 4, 8, 32) if (one := resized(there, count))]
    assert sizes == [(1, 1), (1, 4), (1, 8), (4, 8)]
    assert resized(there, 12) is None
    assert str(resized(cluster("2x4xA100@100Gb/s"), 8)) == "2x4xA100-80GB@100Gb/s"
    assert list(doublings(there, 24)) == [1, 2, 4, 8, 16, 24]
    assert list(doublings(cluster("GB200"), 288)) == [1, 2, 4, 8, 16, 32, 64, 72, 144, 288]
    assert str(resized(cluster("2xcpu"), 8)) == "4x2xcpu"


def test_a_large_model_on_many_devices_is_ranked_in_seconds() -> None:
    asked = question("128x8xH100", 1024, **LARGE)
    found = rank(asked)
    assert found.best is not None
    assert found.search.considered > 10_000


def test_prices_do_not_change_what_is_fastest() -> None:
    asked = question(steps=10)
    priced = Question(work=asked.work, cluster=asked.cluster, precision="bf16", steps=10, prices=Prices(each=2.0))
    found = rank(priced)
    assert found.bill is not None
    assert found.bill.money == pytest.approx(found.bill.device_hours * 2)
    assert [one.plan for one in found.plans] == [one.plan for one in rank(asked).plans]
