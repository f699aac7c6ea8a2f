"""Pipeline schedules, one file each, as orders that the runtime executes, forecasts price and ``show`` draws."""

from phalanx.placement.schedules.order import (
    Order,
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
from phalanx.placement.schedules.schedule import Action, Filling, PipelineSchedule
from phalanx.placement.schedules.table import SCHEDULES, forwards, holders, order

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
    "forwards",
    "holders",
    "in_halves",
    "makespan",
    "needs",
    "order",
    "timed",
    "work",
]
