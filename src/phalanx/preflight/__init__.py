"""What a run here is told before it is over: its forecast, whether that fits, and a plan where none is given."""

from phalanx.preflight.machine_forecast import cluster_for, forecast_here
from phalanx.preflight.plan_choice import PlanChoice, choose_plan, plain_replicas

__all__ = [
    "PlanChoice",
    "choose_plan",
    "cluster_for",
    "forecast_here",
    "plain_replicas",
]
