"""How far off a forecast may be: the width of the interval that holds four of five outcomes."""

from __future__ import annotations

from phalanx.forecast.habits import Habits
from phalanx.spec import Device, Plan


def interval(seconds: float, plan: Plan, device: Device, habits: Habits) -> tuple[float, float]:
    """Seconds between which four of five outcomes lie."""
    spread = 0.12
    return seconds / (1 + spread), seconds * (1 + spread)
