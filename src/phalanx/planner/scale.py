"""Time, cost and efficiency by number of devices, and the worthwhile limit; forecasts as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from phalanx.forecast import Forecast, forecast
from phalanx.planner.question import Bill, Question, bill, doublings
from phalanx.planner.search import search
from phalanx.units import show_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingPoint:
    """The fastest plan for a number of devices."""

    devices: int
    forecast: Forecast
    speed_up: float  # over the fewest devices that the model fits on
    efficiency: float  # device time of a step where that is least, over that of this one
    gain: float  # throughput over that of the point before, less 1; 0 for the first
    bill: Bill  # of the whole training; of one step if its length is unknown

    def to_dict(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("devices", "speed_up", "efficiency", "gain")}
        return {**own, "bill": self.bill.to_dict(), "forecast": forecast_to_dict(self.forecast)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Points by devices."""

    points: tuple[ScalingPoint, ...]  # numbers of devices on which a plan fits, in order
    without: dict[int, str]  # other numbers that were asked for → why they have none
    share: float  # of the ideal gain below which more devices are not worth it
    steps: int  # that bills are for; 0 if they are for one step
    budget: float = 0.0  # most that the training may cost (money if prices are known, else device-hours); 0 for any
    deadline: float = 0.0  # most seconds it may take; 0 for any

    @property
    def knee(self) -> ScalingPoint | None:
        """Return the last point before doubling gains less than ``share`` of the ideal; ``None`` if it never does.

        For other steps than doubling the ideal gain is the ratio less 1.
        """
        for before, after in zip(self.points, self.points[1:], strict=False):
            if after.gain < self.share * (after.devices / before.devices - 1):
                return before
        return None

    @property
    def slower(self) -> ScalingPoint | None:
        """Return the first point slower than one with fewer devices, or ``None``."""
        best = float("inf")
        for point in self.points:
            if point.forecast.step > best:
                return point
            best = min(best, point.forecast.step)
        return None

    @property
    def fastest(self) -> ScalingPoint | None:
        """Return the point with the shortest step; among equal ones the fewest devices."""
        return min(self.points, key=lambda one: one.forecast.step, default=None)

    @property
    def cheapest(self) -> ScalingPoint | None:
        """Return the point with the least bill; among equal ones the fastest."""
        return min(self.points, key=lambda one: (one.bill.amount, one.forecast.step), default=None)

    @property
    def allowed(self) -> tuple[ScalingPoint, ...]:
        return tuple(
            one
            for one in self.points
            if (not self.budget or one.bill.amount <= self.budget)
            and (not self.deadline or one.bill.seconds <= self.deadline)
        )

    @property
    def stop(self) -> ScalingPoint | None:
        """Return the fastest point within budget and deadline, not past the knee, or ``None``.

        If a deadline can only be met past the knee, it is the fewest devices that meet it.
        """
        allowed = self.allowed
        within = [one for one in allowed if self.knee is None or one.devices <= self.knee.devices]
        if within:
            return min(within, key=lambda one: (one.forecast.step, one.devices))
        return allowed[0] if allowed else None

    def to_dict(self) -> dict[str, Any]:
        named = ("knee", "slower", "fastest", "cheapest", "stop")
        marked: dict[str, ScalingPoint | None] = {name: getattr(self, name) for name in named}
        return {
            "points": [one.to_dict() for one in self.points],
            "without": {str(devices): why for devices, why in self.without.items()},
            "share": self.share,
            "steps": self.steps or None,
            "budget": self.budget or None,
            "deadline": self.deadline or None,
            **{name: one.devices if one else None for name, one in marked.items()},
        }


def scale(question: Question, up_to: int, *, share: float = 0.5, budget: float = 0.0, deadline: float = 0.0) -> Curve:
    """Return the fastest plans on 1, 2, 4, ... ``up_to`` devices of the question's first kind.

    ``share``: of the ideal gain below which more devices are not worth it; ``budget`` and ``deadline``: see ``Curve``.
    """
    points, without = curve(question, doublings(question.cluster, up_to))
    return Curve(points=points, without=without, share=share, steps=question.steps, budget=budget, deadline=deadline)


def curve(question: Question, counts: Iterable[int]) -> tuple[tuple[ScalingPoint, ...], dict[int, str]]:
    """Return the fastest plan of each number of devices, and the reasons for numbers without one."""
    points: list[ScalingPoint] = []
    without: dict[int, str] = {}
    for devices in counts:
        there = question.on(devices)
        if there is None:
            without[devices] = "they do not fill whole nodes"
            continue
        found = search(there)
        if found.best is None:
            without[devices] = _why(found.least, found.considered, there)
            continue
        points.append(point_of(there, forecast(there.work, found.best, there.cluster, there.preset), points))
    return compared(points), without


def compared(points: Sequence[ScalingPoint]) -> tuple[ScalingPoint, ...]:
    """Return the points with their efficiency."""
    least = min((one.devices * one.forecast.step for one in points), default=0.0)
    return tuple(replace(one, efficiency=least / (one.devices * one.forecast.step)) for one in points)


def point_of(question: Question, found: Forecast, before: Sequence[ScalingPoint]) -> ScalingPoint:
    """Return a point for a forecast, beside those on fewer devices; ``compared`` adds its efficiency later."""
    return ScalingPoint(
        devices=question.cluster.devices,
        forecast=found,
        speed_up=before[0].forecast.step / found.step if before else 1.0,
        efficiency=1.0,
        gain=before[-1].forecast.step / found.step - 1 if before else 0.0,
        bill=bill(found.step * max(1, question.steps), question.cluster, question.prices),
    )


def _why(least: float, considered: int, question: Question) -> str:
    if not considered:
        return f"no plan deals a batch of {question.work.batch} out to so many"
    room = min(group.device.room for group in question.cluster.groups)
    return f"does not fit: {show_bytes(least - room)} too little on each device"


def forecast_to_dict(one: Forecast) -> dict[str, Any]:
    """Return a forecast as JSON: seconds, bytes, and derived numbers."""
    return {
        "plan": str(one.plan),
        "cluster": one.cluster,
        "devices": one.plan.devices,
        "fits": one.fits,
        "runs_out": one.runs_out,
        "train": f"train does not run this yet: {one.unrun}" if one.unrun else None,
        "step": one.step,
        "low": one.low,
        "high": one.high,
        "basis": one.basis,
        "seconds": one.seconds,
        "memory": one.memory,
        "allocated": one.allocated,
        "reserved": one.reserved,
        "room": one.room,
        "start": one.start,
        "host": one.host,
        "host_room": one.host_room if isfinite(one.host_room) else None,
        "samples": one.samples,
        "tokens": one.tokens,
        "samples_per_second": one.throughput,
        "tokens_per_second": one.throughput * one.tokens,
        "flops": one.flops,
        "mfu": one.mfu,
        "watts": one.watts or None,
        "limits": list(one.limits),
        "exact": one.plan.exactness,
        "notes": list(one.notes),
    }
