"""Pipeline schedules, one file each, as orders that the runtime executes, forecasts price and ``show`` draws."""

from phalanx.placement.schedules.all_schedules import SCHEDULES, forwards, holders, order
from phalanx.placement.schedules.order import (
    KINDS,
    Action,
    Costs,
    Filling,
    Order,
    PipelineSchedule,
    StuckError,
    Timed,
    bubble,
    cost,
    in_halves,
    makespan,
    needs,
    timed,
    work,
)

__all__ = [
    "KINDS",
    "SCHEDULES",
    "Action",
    "Costs",
    "Filling",
    "Order",
    "PipelineSchedule",
    "StuckError",
    "Timed",
    "bubble",
    "cost",
    "forwards",
    "holders",
    "in_halves",
    "makespan",
    "needs",
    "order",
    "timed",
    "work",
]
