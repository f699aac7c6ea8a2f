"""Enumeration, pruning and ranking: complete, valid, and the same as pricing each plan by itself."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from small_profiles import LARGE, transformer

from phalanx.config import Plan
from phalanx.forecast import Work, forecast
from phalanx.forecast.forecast import sweep
from phalanx.forecast.uncertainty import CHANCE, SAFE, runs_out
from phalanx.hardware import cluster
from phalanx.planner import Goal, Prices, Question, rank
from phalanx.planner.explain import explain
from phalanx.planner.question import doublings, precision_for, resized
from phalanx.planner.rank import neighbours
from phalanx.planner.rules import problems
from phalanx.planner.search import MESH, search, space


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


def test_the_first_is_the_fastest_of_all_that_fit_with_a_margin() -> None:
    asked = question("8xA100-40GB", 16, layers=12, width=5120, heads=40)
    found = rank(asked)
    assert found.best is not None
    each = sweep(asked.work, plans(asked), asked.cluster)
    fits, safe = each.fits > 0, each.memory.reserved <= SAFE * each.room
    assert 0 < safe.sum() < fits.sum() < len(fits)
    assert found.best.safe
    assert found.best.step <= each.step.total[safe].min() * (1 + 1e-3)
    search = found.search
    assert (search.considered, search.fitting, search.safe) == (len(fits), fits.sum(), safe.sum())


def test_no_neighbour_that_fits_with_a_margin_is_faster_than_the_first() -> None:
    for on, batch, layers in (("8xA100-40GB", 16, 12), ("8xH100", 24, 20), ("2x8xA100", 48, 12)):
        asked = question(on, batch, layers=layers, width=5120, heads=40)
        best = rank(asked).best
        assert best is not None
        near = sweep(asked.work, [plan for _, plan in neighbours(best.plan, asked)], asked.cluster)
        safe = near.memory.reserved <= SAFE * near.room
        assert not (near.step.total[safe] < best.step).any()


def test_the_chance_to_run_out_is_even_where_the_room_is_just_full() -> None:
    assert runs_out(10.0, 10.0) == pytest.approx(0.5)
    assert runs_out(SAFE * 10.0, 10.0) == pytest.approx(CHANCE)
    assert runs_out(20.0, 10.0) > 0.999 > 0.001 > runs_out(5.0, 10.0)


def test_where_no_plan_leaves_a_margin_those_that_fit_are_ranked() -> None:
    asked = question("1xA100-40GB", 1, layers=12, width=1024, heads=16)
    best = rank(asked).best
    assert best is not None
    (group,) = asked.cluster.groups
    tight = replace(group.device, memory=int(best.reserved + group.device.kept + 2**20))
    tight = replace(asked, cluster=replace(asked.cluster, groups=(replace(group, device=tight),)))
    found = rank(tight)
    while found.best is not None and found.best.safe:  # down to where none leaves one
        (group,) = tight.cluster.groups
        less = replace(group.device, memory=int(group.device.memory * 0.97))
        tight = replace(tight, cluster=replace(tight.cluster, groups=(replace(group, device=less),)))
        found = rank(tight)
    assert found.best is not None
    assert found.best.fits
    assert (found.search.safe, found.best.safe) == (0, False)
    explained = explain(found)
    assert explained is not None
    assert "none of them leaves a margin" in explained.reasons[0]


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
        assert not forecast(asked.work, lesser, asked.cluster).safe


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
