"""The whole answer to "which plan?": the ranking, its explanation, or what is missing for anything to fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.errors import Problem, RefusedError
from phalanx.planner.explain import Explanation, explain, stated
from phalanx.planner.nearest import Shortfall, shortfall
from phalanx.planner.question import Question
from phalanx.planner.rank import Goal, Ranking, rank
from phalanx.units import show_count


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Advice:
    """An answer.

    Attributes:
        question: that was asked, with all of its devices.
        ranking: the best plans.
        explanation: why the first wins; ``None`` where nothing fits.
        shortfall: what is missing; ``None`` where something fits.
    """

    question: Question
    ranking: Ranking
    explanation: Explanation | None
    shortfall: Shortfall | None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **self.ranking.to_dict(),
            "explanation": self.explanation.to_dict() if self.explanation else None,
            "shortfall": self.shortfall.to_dict() if self.shortfall else None,
        }


def advise(question: Question, goal: Goal | None = None, because: str | None = None) -> Advice:
    """The best plans for ``question``, and why; ``because`` is the text of a plan to argue.

    Raises:
        SpecError: if the goal asks for what nobody knows, or ``because`` is no plan.
        RefusedError: if no plan at all can deal the work out to the devices, or the one to be argued cannot.
    """
    argued, keys = stated(because) if because else (None, ())
    ranking = rank(question, goal)
    if not ranking.plans and not ranking.search.considered:
        raise RefusedError([_none(question)])
    return Advice(
        question=question,
        ranking=ranking,
        explanation=explain(ranking, argued, keys=keys),
        shortfall=None if ranking.plans else shortfall(question),
    )


def _none(question: Question) -> Problem:
    work, devices = question.work, question.cluster.devices
    return Problem(
        where="--on",
        given=f"{question.cluster} for a batch of {work.batch} and a model of {work.profile.blocks} blocks, "
        f"{show_count(work.profile.parameters)} parameters",
        allowed=f"a number of devices that samples, heads, blocks or tokens can be dealt out to; {devices} is not",
        fix=f"--batch {max(devices, work.batch)}",
    )
