"""Which plan is best, why, and how many devices are worth it: enumerate, prune by memory, price, rank, explain."""

from phalanx.planner.advise import Advice, advise, config_work
from phalanx.planner.explain import Explanation, Neighbour, explain
from phalanx.planner.nearest_fit import Change, Shortfall, shortfall
from phalanx.planner.question import Bill, Prices, Question, bill, prices
from phalanx.planner.rank import Goal, Ranking, rank
from phalanx.planner.rules import refuse
from phalanx.planner.scale import Curve, ScalingPoint, scale

__all__ = [
    "Advice",
    "Bill",
    "Change",
    "Curve",
    "Explanation",
    "Goal",
    "Neighbour",
    "Prices",
    "Question",
    "Ranking",
    "ScalingPoint",
    "Shortfall",
    "advise",
    "bill",
    "config_work",
    "explain",
    "prices",
    "rank",
    "refuse",
    "scale",
    "shortfall",
]
