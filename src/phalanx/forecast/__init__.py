"""Profile, cluster and plan in; memory, time and energy out. Pure functions, no processes, no torch."""

from phalanx.forecast.forecast import Forecast, forecast, forecasts
from phalanx.forecast.layouts import Lengths, Work
from phalanx.forecast.presets import PHALANX, Preset
from phalanx.forecast.step_time import StepTime

__all__ = [
    "PHALANX",
    "Forecast",
    "Lengths",
    "Preset",
    "StepTime",
    "Work",
    "forecast",
    "forecasts",
]
