"""What a run here is told before it is over: its forecast, whether that fits, and a plan where none is given."""

from phalanx.preflight.plan_choice import PlanChoice, choose, cluster_for, forecast_here, plain
from phalanx.preflight.run_forecast import RunForecaster, forecast_after_look, too_little

__all__ = [
    "PlanChoice",
    "RunForecaster",
    "choose",
    "cluster_for",
    "forecast_after_look",
    "forecast_here",
    "plain",
    "too_little",
]
