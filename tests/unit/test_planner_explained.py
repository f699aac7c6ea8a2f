"""Explanations, shortfalls, curves and bills: true by computing them again."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from small_profiles import LARGE, transformer

from phalanx.config import Plan
from phalanx.errors import RefusedError, SpecError
from phalanx.forecast import Forecast, StepTime, Work, forecast
from phalanx.hardware import cluster, names
from phalanx.planner import Bill, Curve, Goal, Question, ScalingPoint, advise, bill, prices, rank, scale, shortfall
from phalanx.planner.advise import forecast_plan
from phalanx.planner.explain import PARTS, tied
from phalanx.planner.question import precision_for
from phalanx.planner.rank import neighbours
from phalanx.planner.roofline import rooflines
from phalanx.planner.rules import problems
from phalanx.planner.search import search
from phalanx.units import show_bytes


def question(text: str = "8xA100-40GB", batch: int = 32, steps: int = 0, **shape: int) -> Question:
    there = cluster(text)
    work = Work(profile=transformer(**(shape or {"layers": 12, "width": 5120, "heads": 40})), batch=batch)
    return Question(work=work, cluster=there, precision=precision_for(there), steps=steps)


def test_every_part_of_a_step_has_words() -> None:
    assert {one.name for one in fields(StepTime)} <= PARTS.keys()


class TestExplanation:
    def test_neighbours_are_what_they_are_said_to_be(self) -> None:
        asked = question(layers=20, width=5120, heads=40)
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

    def test_neighbours_differ_in_what_is_named_and_can_be_run(self) -> None:
        asked = question()
        plan = Plan(fsdp=2, tp=2, pp=2, micro=4, precision="bf16", recompute="full", zero=1)
        found = dict(neighbours(plan, asked))
        assert found["tp=4 fsdp=1"].zero == 0
        assert found["fsdp=4 pp=1"].schedule == "1f1b"
        assert found["micro=8"] == replace(plan, micro=8)
        assert plan not in found.values()
        assert all(problems(one, asked.work, asked.cluster) == [] for one in found.values())

    def test_reasons_carry_the_numbers_of_the_search(self) -> None:
        advice = advise(question())
        assert advice.explanation is not None
        text = " ".join(advice.explanation.reasons)
        assert f"{advice.ranking.search.fitting} plans that fit, of {advice.ranking.search.considered}" in text

    def test_meshes_within_the_interval_of_the_first_are_called_ties(self) -> None:
        advice = advise(question())
        best, explained = advice.ranking.best, advice.explanation
        assert best is not None
        assert explained is not None
        alike = [one for one in advice.ranking.plans[1:] if one.step <= best.high]
        assert alike
        text = " ".join(explained.reasons)
        assert f"{len(alike)} of the {len(advice.ranking.plans) - 1} other meshes" in text
        assert tied(best, replace(best, seconds={"products": best.high}))
        assert not tied(best, replace(best, seconds={"products": best.high * 1.001}))

    def test_one_device_is_best_is_said_first(self) -> None:
        advice = advise(question(batch=2, layers=2, width=64, heads=2, vocabulary=100, length=128))
        assert advice.explanation is not None
        assert advice.explanation.reasons[0].startswith("More devices do not help: one device is")

    def test_a_plan_in_mind_is_completed_and_compared(self) -> None:
        asked = question()
        argued = advise(asked, because="tp=8").explanation
        assert argued is not None
        assert argued.argued is not None
        found = search(asked, {"tp": 8})
        assert argued.argued.forecast.plan == found.best
        assert argued.argued.slower > 0

    def test_a_plan_in_mind_that_does_not_fit_is_told_by_how_much(self) -> None:
        argued = advise(question(), because="dp=8").explanation
        assert argued is not None
        assert argued.argued is not None
        assert not argued.argued.forecast.fits
        assert "does not fit" in argued.argued.why

    def test_keys_that_are_not_searched_are_argued_as_they_stand(self) -> None:
        argued = advise(question(), because="fsdp=8 offload=optimizer").explanation
        assert argued is not None
        assert argued.argued is not None
        assert str(argued.argued.forecast.plan) == "fsdp=8 precision=bf16 offload=optimizer"

    def test_a_plan_in_mind_that_cannot_run_is_refused(self) -> None:
        with pytest.raises(RefusedError, match="for 6 devices"):
            advise(question(), because="tp=3 dp=2")
        with pytest.raises(RefusedError, match="a model without experts"):
            advise(question(), because="ep=2 dp=4")


class TestShortfall:
    def test_nothing_fits_names_bytes_and_changes_that_do(self) -> None:
        asked = question("2xA100-40GB", 16, **LARGE)
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

    def test_a_given_plan_is_changed_in_one_thing_first(self) -> None:
        asked = question()
        found = forecast_plan(asked, Plan(dp=8, precision="bf16"))
        assert found.shortfall is not None
        assert found.shortfall.changes[0].words.startswith('--plan "')
        assert all(change.spare >= 0 for change in found.shortfall.changes)
        assert len(found.shortfall.changes) == 3

    def test_what_fits_lacks_nothing(self) -> None:
        assert shortfall(question(layers=2, width=64, heads=2)) is None

    def test_too_many_devices_for_the_batch_are_refused(self) -> None:
        with pytest.raises(RefusedError, match="can be dealt out to"):
            advise(question("64xA100", 2, layers=2, width=64, heads=2))


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

    def test_slower_is_the_first_beyond_the_fastest(self) -> None:
        found = curve_of([8, 4, 3, 2.9, 3.5, 5])
        assert (at(found.knee), at(found.slower), at(found.fastest), at(found.stop)) == (2, 16, 8, 2)

    def test_one_device_is_best_where_more_are_slower(self) -> None:
        found = curve_of([1.0, 1.1, 1.3])
        assert (at(found.knee), at(found.slower), at(found.stop)) == (1, 2, 1)

    def test_a_budget_stops_earlier(self) -> None:
        serial = [0.1 + 0.9 / 2**power for power in range(8)]
        assert at(curve_of(serial, money=1.0, budget=1.2).stop) == 2  # costs: 1, 1.1, 1.3, 1.7
        assert curve_of(serial, money=1.0, budget=0.5).stop is None

    def test_a_forecast_curve_doubles_up_to_the_most(self) -> None:
        found = scale(question("A100", 16, layers=4), 12)
        assert [one.devices for one in found.points] == [1, 2, 4, 8]
        assert found.without == {12: "they do not fill whole nodes"}
        assert max(one.efficiency for one in found.points) == pytest.approx(1.0)
        first = found.points[0]
        assert all(one.speed_up == pytest.approx(first.forecast.step / one.forecast.step) for one in found.points)

    def test_devices_without_a_plan_say_why(self) -> None:
        found = scale(question("A100-40GB", 4, **LARGE), 4)
        assert found.points == ()
        assert "too little on each device" in found.without[1]
        assert found.stop is None

    def test_a_curve_of_thousands_takes_a_second(self) -> None:
        found = scale(question("H100", 1024, **LARGE), 4096)
        assert found.points[-1].devices == 4096


class TestCost:
    def test_hours_energy_and_money(self) -> None:
        found = bill(7200, cluster("8xH100"), prices("2.5"))
        assert (found.device_hours, found.money) == (16, 40)
        assert found.energy == pytest.approx(2 * 8 * 0.7)

    def test_no_price_is_known_beforehand(self) -> None:
        assert bill(3600, cluster("8xH100"), prices(None)).money is None

    def test_a_file_prices_each_device(self) -> None:
        Path("p.toml").write_text('currency = "EUR"\n[per_hour]\nH100 = 3\nA100-80GB = 2\n')
        found = bill(3600, cluster("8xH100+8xA100-80GB"), prices("p.toml"))
        assert (found.money, found.currency) == (40, "EUR")
        with pytest.raises(SpecError, match="no price of V100-16GB"):
            bill(1, cluster("V100-16GB"), prices("p.toml"))

    @pytest.mark.parametrize("text", ["much", "-1", "inf", "nowhere.toml"])
    def test_what_is_no_price_is_refused(self, text: str) -> None:
        with pytest.raises(SpecError, match=r"--price"):
            prices(text)

    def test_a_file_of_another_form_is_refused(self) -> None:
        Path("p.toml").write_text("H100 = 3\n")
        with pytest.raises(SpecError, match="per_hour"):
            prices("p.toml")

    def test_bounds_need_to_know_the_steps(self) -> None:
        with pytest.raises(SpecError, match="--steps"):
            rank(question(), Goal(budget=5))


class TestRules:
    @pytest.mark.parametrize(
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
        asked = question(text)
        found = problems(Plan.parse(plan), asked.work, asked.cluster)
        assert [(one.where, one.fix) for one in found] == [(where, fix)]

    def test_ranks_that_do_not_divide_heads_are_forecast_as_they_run(self) -> None:
        asked = question("3xA100")
        assert problems(Plan.parse("tp=3"), asked.work, asked.cluster) == []


def test_rooflines_name_the_bound_of_each_device() -> None:
    asked = question()
    lines = rooflines(asked.work, names())
    assert [one.device for one in lines] == list(names())
    for one in lines:
        device = cluster(one.device).groups[0].device
        assert one.attainable == min(device.peak[one.precision], one.intensity * device.bandwidth)
        assert (one.bound == "memory") == (one.forecast is None) == (one.missing > 0)
        if one.forecast:
            assert one.bound == ("arithmetic" if one.intensity >= one.ridge else "bandwidth")
            assert re.search(r"\d+%$", one.most)
