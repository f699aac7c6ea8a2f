"""Published measurements beside forecasts: how far off they are, by source."""

from published.accuracy import Accuracy, accuracy
from published.foretold import Foretold, Outcome, foretell
from published.rows import Row, read

__all__ = ["Accuracy", "Foretold", "Outcome", "Row", "accuracy", "foretell", "read"]
