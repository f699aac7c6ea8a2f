"""Which plan is best, why, and how many devices are worth it: enumerate, prune by memory, price, rank, explain."""

from phalanx.planner.advise import Advice, advise
from phalanx.planner.explain import explain
from phalanx.planner.nearest_fit import Shortfall, shortfall
from phalanx.planner.question import Bill, Prices, Question, bill, prices
from phalanx.planner.rank import Goal, Ranking, rank
from phalanx.planner.rules import refuse
from phalanx.planner.scale import Curve, ScalingPoint, scale

__all__ = [
    "Advice",
    "Bill",
    "Curve",
    "Goal",
    "Prices",
    "Question",
    "Ranking",
    "ScalingPoint",
    "Shortfall",
    "advise",
    "bill",
    "explain",
    "prices",
    "rank",
    "refuse",
    "scale",
    "shortfall",
]
