"""How far off a forecast may be: the width of the interval that holds four of five outcomes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from phalanx.forecast.habits import Habits
from phalanx.forecast.rates import family
from phalanx.spec import Device

_KNOWN = ("ampere", "hopper")
"""Families of devices that measured runs were at hand of."""

_SHARES = {"memory": 0.54, "exchange": 0.48, "pipeline": 0.22, "replicas": 0.27, "launches": 0.07}
"""By how much of itself each part of a step may be off."""

_BASE = 0.027
_UNKNOWN = 0.2


def interval(seconds: Mapping[str, float], device: Device, habits: Habits) -> tuple[float, float]:
    """Seconds between which four of five outcomes lie, from the parts of a step (see ``StepTime``).

    Doubt adds up as independent errors do: a base, a share of each part that is hard to foretell, and more for families
    of devices never measured. The shares were fitted on half of the published runs.
    """
    total = sum(seconds.values())
    doubts = [_BASE, *(share * seconds[name] / total for name, share in _SHARES.items())]
    spread = habits.doubt * math.sqrt(sum(doubt**2 for doubt in doubts))
    if device.kind != "cpu" and family(device) not in _KNOWN:
        spread = math.hypot(spread, _UNKNOWN)
    return total * math.exp(-spread), total * math.exp(spread)
