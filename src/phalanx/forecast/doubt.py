"""How far off a forecast may be: the width of the interval that holds four of five outcomes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from phalanx.forecast.habits import Habits
from phalanx.forecast.rates import family
from phalanx.spec import Device

_KNOWN = ("ampere", "hopper")
"""Families of devices that measured runs were at hand of."""

_BASE = 0.04
_PARTS = {"launches": 0.25, "exchange": 0.25, "pipeline": 0.25, "replicas": 0.25}
_UNKNOWN = 0.2


def interval(seconds: Mapping[str, float], device: Device, habits: Habits) -> tuple[float, float]:
    """Seconds between which four of five outcomes lie, from the parts of a step (see ``StepTime``).

    Doubt adds up as independent errors do: a base that is left on calibrated runs, a share of each part that is hard to
    foretell, and more for families of devices never measured.
    """
    total = sum(seconds.values())
    doubts = [_BASE * habits.doubt, *(share * seconds[name] / total for name, share in _PARTS.items())]
    if device.kind != "cpu" and family(device) not in _KNOWN:
        doubts.append(_UNKNOWN)
    spread = math.sqrt(sum(doubt**2 for doubt in doubts))
    return total * math.exp(-spread), total * math.exp(spread)
