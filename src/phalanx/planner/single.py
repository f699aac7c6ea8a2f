"""One plan's forecast with all that belongs to it: what it costs, and what would make it fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.errors import RefusedError
from phalanx.forecast import Forecast, forecast
from phalanx.planner.cost import Bill, bill
from phalanx.planner.nearest import Shortfall, shortfall
from phalanx.planner.question import Question
from phalanx.planner.rules import refusals
from phalanx.planner.told import told
from phalanx.spec import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Foretold:
    """A plan's future.

    Attributes:
        question: that was asked.
        forecast: of the plan.
        bill: of the whole training; of one step where its length is not known.
        shortfall: what is missing; ``None`` where it fits.
    """

    question: Question
    forecast: Forecast
    bill: Bill
    shortfall: Shortfall | None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **told(self.forecast),
            "steps": self.question.steps or None,
            "bill": self.bill.to_dict(),
            "shortfall": self.shortfall.to_dict() if self.shortfall else None,
        }


def foretell(question: Question, plan: Plan | None = None) -> Foretold:
    """The future of ``plan``, or of replicas on all devices where none is given.

    Raises:
        RefusedError: if the plan cannot serve the work on the cluster.
    """
    chosen = plan or Plan(dp=question.cluster.devices, precision=question.precision)
    if wrong := refusals(chosen, question):
        raise RefusedError(wrong)
    found = forecast(question.work, chosen, question.cluster, question.habits)
    return Foretold(
        question=question,
        forecast=found,
        bill=bill(found.step * max(1, question.steps), question.cluster, question.prices),
        shortfall=None if found.fits else shortfall(question, chosen),
    )
