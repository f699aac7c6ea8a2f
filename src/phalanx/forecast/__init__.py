"""Profile, cluster and plan in; memory, time and energy out. Pure functions, no processes, no torch."""

from phalanx.forecast.forecast import Forecast, Sweep, forecast, forecasts, sweep
from phalanx.forecast.habits import PHALANX, Habits
from phalanx.forecast.lengths import Lengths
from phalanx.forecast.memory import Memory
from phalanx.forecast.step import StepTime
from phalanx.forecast.work import Work

__all__ = [
    "PHALANX",
    "Forecast",
    "Habits",
    "Lengths",
    "Memory",
    "StepTime",
    "Sweep",
    "Work",
    "forecast",
    "forecasts",
    "sweep",
]
