"""Pipeline schedules, one file each, as orders that the runtime executes, forecasts price and ``show`` draws."""

from phalanx.placement.schedules.all_schedules import SCHEDULES, forwards, holders, order
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
from phalanx.placement.schedules.pipeline_schedule import Action, Filling, PipelineSchedule

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
