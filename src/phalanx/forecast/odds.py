"""How likely a plan that is forecast to fit runs out of memory all the same."""

from __future__ import annotations

import math
from statistics import NormalDist

_SPREAD = 0.075
"""Of the logarithm of memory needed over memory forecast: probit regression of having run out of memory on forecast
over room, of 391 published layouts of Llama 13B and 30B, 257 of which ran out."""

CHANCE = 0.1
"""Of running out of memory that a plan may have to be recommended."""

SAFE = math.exp(-NormalDist().inv_cdf(1 - CHANCE) * _SPREAD)
"""Share of the room that a plan fills which has that chance."""


def runs_out(reserved: float, room: float) -> float:
    """The chance that a plan which is forecast to need ``reserved`` bytes needs more than ``room``."""
    return NormalDist().cdf(math.log(reserved / room) / _SPREAD) if reserved > 0 < room else 0.0
