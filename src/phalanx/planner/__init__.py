"""The best plan, its reasons, and the worthwhile number of devices: enumerate, prune by memory, price, rank,
explain.
"""

from phalanx.planner.advise import Advice, advise
from phalanx.planner.explain import explain
from phalanx.planner.nearest_fit import Shortfall, shortfall
from phalanx.planner.question import Bill, Prices, Question, prices
from phalanx.planner.rank import Ranking, rank
from phalanx.planner.scale import scale

__all__ = [
    "Advice",
    "Bill",
    "Prices",
    "Question",
    "Ranking",
    "Shortfall",
    "advise",
    "explain",
    "prices",
    "rank",
    "scale",
    "shortfall",
]
