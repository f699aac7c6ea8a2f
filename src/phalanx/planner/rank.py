"""Ranking of plans by a goal, with a trial of the best plan's neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal, get_args

from phalanx.config import Plan
from phalanx.config.plan import Recompute
from phalanx.config.sync import AUTO
from phalanx.errors import Problem, SpecError
from phalanx.forecast import Forecast, forecasts
from phalanx.placement.batch_split import largest_even
from phalanx.placement.schedules import SCHEDULES
from phalanx.planner.question import Bill, Question, bill, doublings
from phalanx.planner.rules import problems
from phalanx.planner.scale import ScalingPoint, compared, curve, forecast_to_dict, point_of
from phalanx.planner.search import Search, search

_MOST = 6  # plans that are given
_STEPS = 4  # from a plan to a faster neighbour of it, at most
By = Literal["time", "cost", "devices"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """The criterion for the best plan."""

    # ``time`` of a step on all devices; ``cost`` of a sample, on as many devices as that takes; ``devices``, the fewest
    # within deadline and budget
    by: By = "time"
    deadline: float = 0.0  # most seconds of the whole training; 0 for any
    budget: float = 0.0  # most that it may cost: money if prices are known, else device-hours; 0 for any

    def check(self, question: Question) -> None:
        """Raise every problem with ``question``.

        Raises:
            SpecError: with every problem found.
        """
        problems: list[Problem] = []
        if (self.deadline or self.budget) and not question.steps:
            allowed = "optimizer steps of the whole training, which deadline and budget are for"
            problems.append(Problem(where="--steps", given="nothing", allowed=allowed, fix="--steps 10000"))
        if self.by == "devices" and not (self.deadline or self.budget):
            allowed = "a deadline or a budget, for the fewest devices within it"
            problems.append(Problem(where="--best devices", given="neither", allowed=allowed, fix="--deadline 24h"))
        if problems:
            raise SpecError(problems)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ranking:
    """Plans of one number of devices, the best first.

    Attributes:
        question: with the devices of the best plan.
        goal: the order's criterion.
        search: the priced plans.
        plans: the best plan of each mesh, at most a few; empty if none fits.
        points: the best on fewer and on all devices, by devices.
        bill: of the whole training under the first plan; of one step if its length is unknown.
        met: whether the first plan is within deadline and budget.
    """

    question: Question
    goal: Goal
    search: Search
    plans: tuple[Forecast, ...]
    points: tuple[ScalingPoint, ...]
    bill: Bill | None
    met: bool

    @property
    def best(self) -> Forecast | None:
        return self.plans[0] if self.plans else None

    @property
    def fewer(self) -> ScalingPoint | None:
        """Return the fastest on fewer devices, if it is as fast as the first plan or faster."""
        if self.best is None:
            return None
        there = [one for one in self.points if one.devices < self.question.cluster.devices]
        fastest = min(there, key=lambda one: (one.forecast.step, one.devices), default=None)
        return fastest if fastest and fastest.forecast.step <= self.best.step else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "cluster": str(self.question.cluster),
            "devices": self.question.cluster.devices,
            "by": self.goal.by,
            "deadline": self.goal.deadline or None,
            "budget": self.goal.budget or None,
            "met": self.met,
            "steps": self.question.steps or None,
            "considered": self.search.considered,
            "fitting": self.search.fitting,
            "plans": [forecast_to_dict(one) for one in self.plans],
            "points": [one.to_dict() for one in self.points],
            "fewer": self.fewer.devices if self.fewer else None,
            "bill": self.bill.to_dict() if self.bill else None,
        }


def rank(question: Question, goal: Goal | None = None) -> Ranking:
    """Return the best few plans for ``question`` by ``goal``, by default by time.

    Raises:
        SpecError: if the goal needs unknown numbers.
    """
    goal = goal or Goal()
    goal.check(question)
    full = question.cluster.devices
    counts = [] if question.mixed else [count for count in doublings(question.cluster, full) if count < full]
    found = search(question, most=_MOST)
    points = list(curve(question, counts)[0])
    chosen, plans = question, _first(question, found)
    if plans:
        points.append(point_of(question, plans[0], points))
    if points and goal.by != "time":
        point = _chosen(goal, points)
        chosen = (question.on(point.devices) if point.devices != full else question) or question
        if chosen is not question:
            found = search(chosen, most=_MOST)
            plans = _first(chosen, found)
    plans = _that_run(chosen, plans)
    paid = bill(plans[0].step * max(1, question.steps), chosen.cluster, question.prices) if plans else None
    return Ranking(
        question=chosen,
        goal=goal,
        search=found,
        plans=tuple(plans),
        points=compared(points),
        bill=paid,
        met=paid is not None and _within(goal, paid),
    )


def _first(question: Question, found: Search) -> list[Forecast]:
    """Return the best plan of each of the first meshes, priced event by event, the fastest first.

    Plans that differ from the fastest in one key may not have been searched, or were priced by a formula. If such a
    neighbour is faster, it becomes the first and its own neighbours are priced.
    """
    plans = found.by_mesh(_MOST)
    made = list(forecasts(question.work, plans, question.cluster, question.preset)) if plans else []
    for _ in range(_STEPS if made else 0):
        made.sort(key=lambda one: one.step)
        near = [plan for _, plan in neighbours(made[0].plan, question)]
        each = forecasts(question.work, near, question.cluster, question.preset) if near else ()
        quicker = [one for one in each if (one.safe or not made[0].safe) and one.fits and one.step < made[0].step]
        if not quicker:
            break
        best = min(quicker, key=lambda one: one.step)
        made = [best, *(one for one in made if one.plan.mesh != best.plan.mesh)]
    return made[:_MOST]


def _that_run(question: Question, plans: list[Forecast]) -> list[Forecast]:
    if question.look is not None:
        looked = [question.look(one.plan) if not one.unrun else [] for one in plans]
        plans = [replace(one, unrun=wrong[0].given) if wrong else one for one, wrong in zip(plans, looked, strict=True)]
    return sorted(plans, key=lambda one: bool(one.unrun))


def _chosen(goal: Goal, points: list[ScalingPoint]) -> ScalingPoint:
    within = [point for point in points if _within(goal, point.bill)]
    if goal.by == "cost":
        return min(within or points, key=lambda one: (one.bill.amount, one.forecast.step))
    if within:
        return min(within, key=lambda one: one.devices)
    return min(points, key=lambda one: one.bill.seconds if goal.deadline else one.bill.amount)


def _within(goal: Goal, paid: Bill) -> bool:
    return (not goal.deadline or paid.seconds <= goal.deadline) and (not goal.budget or paid.amount <= goal.budget)


_MESH = ("dp", "fsdp", "tp", "pp", "cp", "ep")


def neighbours(plan: Plan, question: Question) -> Iterator[tuple[str, Plan]]:
    """Yield changes in words, and the changed plans: those that could run, whether they fit or not."""
    seen = {plan}
    for change, changes in _changes(plan, question):
        try:
            other = _tidy(plan, changes)
        except SpecError:
            continue
        node = gcd(*(group.per_node for group in question.cluster.groups))
        if other in seen or node % other.tp or problems(other, question.work, question.cluster):
            continue
        seen.add(other)
        yield change, other


def _changes(plan: Plan, question: Question) -> Iterator[tuple[str, dict[str, Any]]]:
    for source in _MESH:
        size = getattr(plan, source)
        factor = next((one for one in range(2, size + 1) if size % one == 0), 0)
        for target in _MESH:
            if factor and target != source:
                more, less = getattr(plan, target) * factor, size // factor
                yield f"{target}={more} {source}={less}", {source: less, target: more}
    yield from ((f"zero={zero}", {"zero": zero}) for zero in (1, 2, 3) if plan.fsdp > 1)
    share = largest_even(question.work.batch, plan.replicas)
    micro = plan.micro or share
    yield from ((f"micro={one}", {"micro": one}) for one in (micro * 2, micro // 2) if 1 <= one <= share)
    yield from ((f"recompute={one}", {"recompute": one}) for one in get_args(Recompute))
    if plan.pp > 1:
        for schedule in (name for name, one in SCHEDULES.items() if one.searched):
            yield f"schedule={schedule}", {"schedule": schedule, "stages": None}
    if plan.shares:
        yield "even shares", {"shares": ""}
    elif question.mixed:
        yield f"shares={AUTO}", {"shares": AUTO}
    if plan.tp > 1:
        yield f"sequence={str(not plan.sequence).lower()}", {"sequence": not plan.sequence}


def _tidy(plan: Plan, changes: dict[str, Any]) -> Plan:
    given = {name: changes.get(name, getattr(plan, name)) for name in _MESH}
    if given["fsdp"] == 1:
        changes = {**changes, "zero": 0}
    elif plan.fsdp == 1 and "zero" not in changes:
        changes = {**changes, "zero": 1}
    if given["pp"] == 1:
        changes = {**changes, "schedule": "1f1b", "stages": None}
    elif plan.pp > 1 and changes.get("zero", plan.zero) == 2:
        changes = {**changes, "zero": 1}
    if given["tp"] == 1 or given["cp"] > 1:
        changes = {**changes, "sequence": False}
    if given["dp"] == 1 or given["pp"] > 1:
        changes = {**changes, "shares": ""}
    if given["cp"] == 1:
        changes = {**changes, "attention": "ring"}
    return replace(plan, **changes)
