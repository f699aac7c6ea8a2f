"""Plans that a search finds, ranks and explains; shortfalls, curves and bills: true by computing them again."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from small_profiles import LARGE, transformer

from law_rows import in_one_test
from phalanx.config import Plan
from phalanx.errors import Problem, RefusedError, SpecError
from phalanx.forecast import Forecast, StepTime, Work, forecast
from phalanx.forecast.forecast import sweep
from phalanx.forecast.uncertainty import SAFE
from phalanx.hardware import cluster, names
from phalanx.planner import Bill, Question, advise, prices, rank, scale
from phalanx.planner.explain import PARTS
from phalanx.planner.question import bill, doublings, precision_for, resized
from phalanx.planner.rank import Goal, neighbours
from phalanx.planner.roofline import rooflines
from phalanx.planner.rules import problems
from phalanx.planner.scale import Curve, ScalingPoint
from phalanx.planner.search import MESH, search, space
from phalanx.units import show_bytes


def question(text: str = "8xA100-80GB", batch: int = 32, steps: int = 0, **shape: int) -> Question:
    there = cluster(text)
    work = Work(profile=transformer(**shape), batch=batch)
    return Question(work=work, cluster=there, precision=precision_for(there), steps=steps)


def plans(asked: Question) -> list[Plan]:
    found = space(asked)
    return [found.plan(index) for index in range(len(found))]


@in_one_test(("text", "batch"), [("A100", 4), ("6xA100", 7), ("8xA100", 32), ("2x8xV100", 8), ("4xcpu", 3)])
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


@in_one_test("by", ["cost", "devices"])
def test_other_goals_choose_other_numbers_of_devices(by: str) -> None:
    asked = question("8xA100", 64, steps=1000, layers=24, width=2048)
    fastest = rank(asked)
    assert fastest.bill is not None
    goal = Goal(by=by, deadline=3 * fastest.bill.seconds)
    found = rank(asked, goal)
    assert found.met
    assert found.bill is not None
    within = [one for one in found.points if one.bill.seconds <= goal.deadline]
    if by == "cost":
        assert found.bill.device_hours == pytest.approx(min(one.bill.device_hours for one in within))
    else:
        assert found.question.cluster.devices == min(one.devices for one in within) < 8


def test_plans_that_do_not_run_stand_behind_those_that_do() -> None:
    asked = question("4xA100", 32)
    first = rank(asked).plans[0].plan
    wrong = Problem(where="plan", given="what no run can do", allowed="other plans", fix="dp=4")
    *others, last = rank(replace(asked, look=lambda plan: [wrong] if plan == first else [])).plans
    assert (last.plan, last.unrun) == (first, wrong.given)
    assert [one.unrun for one in others] == [""] * 5


def test_bounds_that_cannot_be_met_say_so() -> None:
    asked = question("4xA100", 32, steps=1000)
    assert not rank(asked, Goal(budget=1e-9)).met
    for goal, nearest in ((Goal(by="devices", deadline=1e-3), "seconds"), (Goal(by="devices", budget=1e-9), "amount")):
        found = rank(asked, goal)
        assert not found.met
        assert found.bill is not None
        assert getattr(found.bill, nearest) == pytest.approx(min(getattr(one.bill, nearest) for one in found.points))


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


def large_question(text: str = "8xA100-40GB", batch: int = 32, steps: int = 0, **shape: int) -> Question:
    there = cluster(text)
    work = Work(profile=transformer(**(shape or {"layers": 12, "width": 5120, "heads": 40})), batch=batch)
    return Question(work=work, cluster=there, precision=precision_for(there), steps=steps)


def test_every_part_of_a_step_has_words() -> None:
    assert {one.name for one in fields(StepTime)} <= PARTS.keys()


class TestExplanation:
    def test_neighbours_are_what_they_are_said_to_be(self) -> None:
        asked = large_question(layers=20, width=5120, heads=40)
        advice = advise(asked)
        assert advice.explanation is not None
        assert advice.ranking.best is not None
        best = advice.ranking.best
        assert len(advice.explanation.neighbours) > 5
        assert any(not one.forecast.fits for one in advice.explanation.neighbours)
        for one in advice.explanation.neighbours:
            again = forecast(asked.work, Plan.parse(str(one.forecast.plan)), asked.cluster)
            assert again.step == pytest.approx(one.forecast.step)
            assert one.slower == pytest.approx(again.step / best.step - 1)
            assert ("does not fit" in one.why) == (not again.fits)
            if not again.fits:
                assert show_bytes(again.reserved - again.room) in one.why
            elif again.safe:
                assert again.step >= best.step * 0.999
            for word in one.change.split():
                key, _, value = word.partition("=")
                shown = getattr(again.plan, key)
                assert shown == (
                    None if shown is None else type(shown)(value == "true" if value in ("true", "false") else value)
                )

    def test_a_plan_in_mind_is_completed_and_compared(self) -> None:
        asked = large_question()
        argued = advise(asked, because="tp=8").explanation
        assert argued is not None
        assert argued.argued is not None
        found = search(asked, {"tp": 8})
        assert argued.argued.forecast.plan == found.best
        assert argued.argued.slower > 0

    def test_a_plan_in_mind_that_cannot_run_is_refused(self) -> None:
        with pytest.raises(RefusedError, match="for 6 devices"):
            advise(large_question(), because="tp=3 dp=2")
        with pytest.raises(RefusedError, match="a model without experts"):
            advise(large_question(), because="ep=2 dp=4")


class TestShortfall:
    def test_nothing_fits_names_bytes_and_changes_that_do(self) -> None:
        asked = large_question("2xA100-40GB", 16, **LARGE)
        advice = advise(asked)
        missing = advice.shortfall
        assert missing is not None
        assert advice.ranking.plans == ()
        there = forecast(asked.work, missing.plan, asked.cluster)
        assert missing.missing == pytest.approx(there.reserved - there.room)
        assert missing.missing == pytest.approx(advice.ranking.search.least - there.room)
        assert 1 <= len(missing.changes) <= 3
        for change in missing.changes:
            again = _changed(asked, change.words)
            found = forecast(again.work, change.plan, again.cluster)
            assert found.fits
            assert change.spare == pytest.approx(found.room - found.reserved)

    def test_the_next_larger_device_on_which_it_fits_is_named(self) -> None:
        missing = advise(large_question("A100-40GB", 8, layers=10, width=5120, heads=40)).shortfall
        assert "--on 1xH100" in [one.words for one in missing.changes]  # an A40 is larger, and too small


def _changed(asked: Question, words: str) -> Question:
    option, _, value = words.partition(" ")
    if option == "--on":
        return replace(asked, cluster=cluster(value))
    if option == "--seq":
        return replace(asked, work=replace(asked.work, length=int(value)))
    return asked


def curve_of(steps: list[float], *, share: float = 0.5, money: float = 0.0, budget: float = 0.0) -> Curve:
    """A curve with these seconds a step on 1, 2, 4, ... devices."""
    whole = forecast(Work(profile=transformer(), batch=32), Plan(), cluster("A100"))
    points: list[ScalingPoint] = []
    for at, step in enumerate(steps):
        one: Forecast = replace(whole, seconds={"products": step})
        paid = Bill(
            seconds=step, device_hours=step * 2**at, energy=None, money=money * 2**at * step or None, currency=""
        )
        gain = steps[at - 1] / step - 1 if at else 0.0
        points.append(
            ScalingPoint(devices=2**at, forecast=one, speed_up=steps[0] / step, efficiency=1.0, gain=gain, bill=paid)
        )
    return Curve(points=tuple(points), without={}, share=share, steps=1, budget=budget)


def at(point: ScalingPoint | None) -> int | None:
    return point.devices if point else None


class TestCurve:
    def test_the_knee_is_before_the_first_poor_doubling(self) -> None:
        serial = [0.1 + 0.9 / 2**power for power in range(8)]  # Amdahl: a tenth does not scale
        assert at(curve_of(serial).knee) == 8  # 16 gain 36 % of throughput
        assert at(curve_of(serial, share=0.2).knee) == 32
        assert curve_of([1 / 2**power for power in range(6)]).knee is None

    def test_a_budget_stops_earlier(self) -> None:
        serial = [0.1 + 0.9 / 2**power for power in range(8)]
        assert at(curve_of(serial, money=1.0, budget=1.2).stop) == 2  # costs: 1, 1.1, 1.3, 1.7
        assert curve_of(serial, money=1.0, budget=0.5).stop is None

    def test_a_forecast_curve_doubles_up_to_the_most(self) -> None:
        found = scale(large_question("A100", 16, layers=4), 12)
        assert [one.devices for one in found.points] == [1, 2, 4, 8]
        assert found.without == {12: "they do not fill whole nodes"}
        assert max(one.efficiency for one in found.points) == pytest.approx(1.0)
        first = found.points[0]
        assert all(one.speed_up == pytest.approx(first.forecast.step / one.forecast.step) for one in found.points)


class TestCost:
    def test_hours_energy_and_money(self) -> None:
        found = bill(7200, cluster("8xH100"), prices("2.5"))
        assert (found.device_hours, found.money) == (16, 40)
        assert found.energy == pytest.approx(2 * 8 * 0.7)

    def test_a_file_prices_each_device(self) -> None:
        Path("p.toml").write_text('currency = "EUR"\n[per_hour]\nH100 = 3\nA100-80GB = 2\n')
        found = bill(3600, cluster("8xH100+8xA100-80GB"), prices("p.toml"))
        assert (found.money, found.currency) == (40, "EUR")
        with pytest.raises(SpecError, match="no price of V100-16GB"):
            bill(1, cluster("V100-16GB"), prices("p.toml"))

    @in_one_test("text", ["much", "-1", "inf", "nowhere.toml"])
    def test_what_is_no_price_is_refused(self, text: str) -> None:
        with pytest.raises(SpecError, match=r"--price"):
            prices(text)

    def test_bounds_need_to_know_the_steps(self) -> None:
        with pytest.raises(SpecError, match="--steps"):
            rank(large_question(), Goal(budget=5))


class TestRules:
    @in_one_test(
        ("text", "plan", "where", "fix"),
        [
            ("8xA100", "fsdp=4", "plan", 'plan="dp=2 fsdp=4"'),
            ("4xA100", "fsdp=8", "plan", 'cluster="8xA100-80GB"'),
            ("64xA100", "dp=64", "plan", "dp=32"),
            ("8xA100", "pp=4 fsdp=2 zero=2", "plan.zero", "fsdp=2 pp=4 zero=1"),
            ("2xA100", "ep=2", "plan.ep", "dp=2"),
            ("16xA100", "pp=16", "plan.pp", "pp=14 schedule=1f1b"),
            ("8xV100", "dp=8 precision=bf16", "plan.precision", "precision=fp16"),
            ("8xA100+8xV100", "fsdp=16", "plan", 'plan="dp=2 fsdp=8 shares=auto"'),
        ],
    )
    def test_what_cannot_be_names_what_can(self, text: str, plan: str, where: str, fix: str) -> None:
        asked = large_question(text)
        found = problems(Plan.parse(plan), asked.work, asked.cluster)
        assert [(one.where, one.fix) for one in found] == [(where, fix)]


def test_rooflines_name_the_bound_of_each_device() -> None:
    asked = large_question()
    some = list(names())[::4]
    lines = rooflines(asked.work, some)
    assert [one.device for one in lines] == some
    for one in lines:
        device = cluster(one.device).groups[0].device
        assert one.attainable == min(device.peak[one.precision], one.intensity * device.bandwidth)
        assert (one.bound == "memory") == (one.forecast is None) == (one.missing > 0)
        if one.forecast:
            assert one.bound == ("arithmetic" if one.intensity >= one.ridge else "bandwidth")
            assert re.search(r"\d+%$", one.most)
