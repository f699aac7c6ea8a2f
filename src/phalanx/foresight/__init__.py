"""What a run here is told before it is over: its forecast, whether that fits, and a plan where none is given."""

from phalanx.foresight.beside import too_little
from phalanx.foresight.choice import Choice, choose, plain
from phalanx.foresight.here import cluster_for
from phalanx.foresight.question import forecast_here
from phalanx.foresight.teller import Teller

__all__ = ["Choice", "Teller", "choose", "cluster_for", "forecast_here", "plain", "too_little"]
