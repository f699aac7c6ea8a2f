"""Pipeline schedules as orders that the runtime executes, forecasts price and ``show`` draws."""

from phalanx.placement.schedules.all_schedules import SCHEDULES, forwards, holders, order
from phalanx.placement.schedules.order import (
    Action,
    Filling,
    Order,
    PipelineSchedule,
    StuckError,
    Timed,
    bubble,
    cost,
    ends,
    in_halves,
    needs,
    timed,
    work,
)

__all__ = [
    "SCHEDULES",
    "Action",
    "Filling",
    "Order",
    "PipelineSchedule",
    "StuckError",
    "Timed",
    "bubble",
    "cost",
    "ends",
    "forwards",
    "holders",
    "in_halves",
    "needs",
    "order",
    "timed",
    "work",
]
