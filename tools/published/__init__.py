"""Published measurements beside forecasts: how far off they are, by source."""

from published.accuracy import Accuracy, Foretold, Outcome, accuracy, foretell
from published.rows import Row, read

__all__ = ["Accuracy", "Foretold", "Outcome", "Row", "accuracy", "foretell", "read"]
