"""Published measurements beside forecasts: how far off they are, by source."""

from published.accuracy import Accuracy, Comparison, Outcome, accuracy, forecast_rows
from published.rows import Row, read

__all__ = ["Accuracy", "Comparison", "Outcome", "Row", "accuracy", "forecast_rows", "read"]
