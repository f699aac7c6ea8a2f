"""What a run here is told before it is over: its forecast, whether that fits, and a plan where none is given."""

from phalanx.preflight.machine_forecast import cluster_for, forecast_here
from phalanx.preflight.plan_choice import PlanChoice, choose_plan, plain_replicas
from phalanx.preflight.run_forecast import RunForecaster, forecast_after_look, too_little

__all__ = [
    "PlanChoice",
    "RunForecaster",
    "choose_plan",
    "cluster_for",
    "forecast_after_look",
    "forecast_here",
    "plain_replicas",
    "too_little",
]
