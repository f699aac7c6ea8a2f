"""Published measurements beside forecasts: how far off they are, by source."""

from phalanx.verify.published.accuracy import Accuracy, accuracy
from phalanx.verify.published.foretold import Foretold, Outcome, foretell
from phalanx.verify.published.rows import Row, read

__all__ = ["Accuracy", "Foretold", "Outcome", "Row", "accuracy", "foretell", "read"]
