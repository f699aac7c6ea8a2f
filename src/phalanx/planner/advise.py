"""Answers to "which plan?" and "what of this one?"; a ``config.json`` as work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.config import Plan
from phalanx.errors import Problem, RefusedError, SpecError
from phalanx.forecast import Forecast, Work, forecast
from phalanx.planner.explain import Explanation, explain, plan_and_keys
from phalanx.planner.nearest_fit import Shortfall, shortfall
from phalanx.planner.question import Bill, Question, bill
from phalanx.planner.rank import Goal, Ranking, rank
from phalanx.planner.rules import refusals
from phalanx.planner.scale import forecast_to_dict
from phalanx.units import show_count


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Advice:
    """An answer.

    Attributes:
        question: the one asked, with all of its devices.
        ranking: the best plans.
        explanation: the reasons for the first; ``None`` if no plan fits.
        shortfall: the missing memory; ``None`` if a plan fits.
    """

    question: Question
    ranking: Ranking
    explanation: Explanation | None
    shortfall: Shortfall | None

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.ranking.to_dict(),
            "explanation": self.explanation.to_dict() if self.explanation else None,
            "shortfall": self.shortfall.to_dict() if self.shortfall else None,
        }


def advise(question: Question, goal: Goal | None = None, because: str | None = None) -> Advice:
    """Return the best plans for ``question``, with reasons; ``because`` is the text of a plan to compare.

    Raises:
        SpecError: if the goal needs unknown numbers, or ``because`` is no plan.
        RefusedError: if no plan at all can spread the work over the devices, or the one to compare cannot.
    """
    argued, keys = plan_and_keys(because) if because else (None, ())
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
        where="cluster",
        given=f"{question.cluster} for a batch of {work.batch} and a model of {work.profile.blocks} blocks, "
        f"{show_count(work.profile.parameters)} parameters",
        allowed=f"a number of devices that samples, heads, blocks or tokens can be shared out over; {devices} is not",
        fix=f"batch={max(devices, work.batch)}",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanForecast:
    """A plan's forecast."""

    question: Question  # that was asked
    forecast: Forecast
    bill: Bill  # of the whole training; of one step if its length is unknown
    shortfall: Shortfall | None  # what is missing; ``None`` where it fits

    def to_dict(self) -> dict[str, Any]:
        return {
            **forecast_to_dict(self.forecast),
            "steps": self.question.steps or None,
            "bill": self.bill.to_dict(),
            "shortfall": self.shortfall.to_dict() if self.shortfall else None,
        }


def forecast_plan(question: Question, plan: Plan | None = None) -> PlanForecast:
    """Return the forecast of ``plan``, by default of replicas on all devices.

    Raises:
        RefusedError: if the plan cannot serve the work on the cluster.
    """
    chosen = plan or Plan(dp=question.cluster.devices, precision=question.precision)
    if wrong := refusals(chosen, question):
        raise RefusedError(wrong)
    found = forecast(question.work, chosen, question.cluster, question.preset)
    return PlanForecast(
        question=question,
        forecast=found,
        bill=bill(found.step * max(1, question.steps), question.cluster, question.prices),
        shortfall=None if found.fits else shortfall(question, chosen),
    )


def is_config(what: str) -> bool:
    """Return True if ``what`` is the path of a ``config.json``, or of a folder that holds one."""
    path = Path(what)
    return path.suffix == ".json" or (path / "config.json").is_file()


def config_work(path: str, *, batch: int, length: int = 0) -> Work:
    """Return the work of training the model of a configuration with AdamW.

    Args:
        path: of a ``config.json``, or of the folder that holds it.
        batch: samples in one step of all devices.
        length: tokens in a sample; 0 for the model's own length, at most 4096.

    Raises:
        SpecError: if ``batch`` is 0, or the file cannot be read, or is of an unknown architecture.
    """
    if not batch:
        allowed = "samples in one step of all devices: a configuration does not say"
        raise SpecError([Problem(where="--batch", given="nothing", allowed=allowed, fix="--batch 1024")])
    from phalanx.trace.standard_models import from_config

    return Work(profile=from_config(path, length=length).profile(), batch=batch, length=length)
