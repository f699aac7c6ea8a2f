"""The reasons for the first plan, the cost of its neighbours, and a comparison with a user's plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.config import Plan
from phalanx.config.plan import words
from phalanx.errors import RefusedError
from phalanx.forecast import Forecast, forecast
from phalanx.forecast.forecast import forecasts
from phalanx.forecast.uncertainty import CHANCE
from phalanx.planner.question import Question
from phalanx.planner.rank import Ranking, neighbours
from phalanx.planner.rules import problems, refusals
from phalanx.planner.scale import forecast_to_dict
from phalanx.planner.search import SEARCHED, search
from phalanx.units import show_bytes, show_seconds

PARTS: Mapping[str, str] = {
    "products": "matrix products",
    "attention": "attention",
    "memory": "elementwise kernels",
    "recompute": "recomputing",
    "launches": "waiting for launches",
    "exchange": "exchange within the model",
    "pipeline": "waiting in the pipeline",
    "replicas": "bringing replicas together",
    "stragglers": "waiting for the slowest rank",
    "update": "the optimizer",
    "rest": "data and logging",
}
"""The parts of a step, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbour:
    """A plan beside the first."""

    change: str  # the changed keys
    forecast: Forecast
    slower: float  # its step over that of the first, less 1
    why: str

    def to_dict(self) -> dict[str, Any]:
        told = {"change": self.change, "slower": self.slower, "why": self.why}
        return {**told, "forecast": forecast_to_dict(self.forecast)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """The explanation of a ranking.

    Attributes:
        reasons: a sentence for each reason of the first plan.
        neighbours: plain FSDP over all devices if it can run; the nearest in time; then those that do not fit.
        argued: the user's plan beside the first, or ``None``.
    """

    reasons: tuple[str, ...]
    neighbours: tuple[Neighbour, ...]
    argued: Neighbour | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "reasons": list(self.reasons),
            "neighbours": [one.to_dict() for one in self.neighbours],
            "argued": self.argued.to_dict() if self.argued else None,
        }


def explain(ranking: Ranking, because: Plan | None = None, *, keys: Sequence[str] = ()) -> Explanation | None:
    """Return the reasons for the first of ``ranking``; ``None`` if no plan fits.

    ``because``: a plan to compare; ``keys``: its stated keys, while the others are chosen as well as possible.

    Raises:
        RefusedError: if no plan with the stated keys could run.
    """
    best, question = ranking.best, ranking.question
    if best is None:
        return None
    near = list(neighbours(best.plan, question))
    priced = forecasts(question.work, [plan for _, plan in near], question.cluster, question.preset) if near else ()
    found = [differences(best, one, change) for (change, _), one in zip(near, priced, strict=True)]
    found.sort(key=lambda one: (not one.forecast.fits, one.forecast.step))
    if (many := question.cluster.devices) > 1:
        plain = Plan(fsdp=many, zero=3, precision=question.precision)
        if not problems(plain, question.work, question.cluster):
            one = _beside(best, question, plain, f"fsdp={many} zero=3")
            found.insert(0, replace(one, why=f"plain FSDP: {one.why}"))
    return Explanation(
        reasons=tuple(_reasons(ranking)),
        neighbours=tuple(found),
        argued=_argued(ranking, because, keys) if because else None,
    )


def differences(best: Forecast, other: Forecast, change: str) -> Neighbour:
    """Compare ``other`` with ``best``, with the parts that differ."""
    slower = other.step / best.step - 1
    if not other.fits:
        why = f"does not fit: {show_bytes(other.missing)} too much, most of it {_most(best, other)}"
    else:
        why = _difference(best, other)
    return Neighbour(change=change, forecast=other, slower=slower, why=why)


def _most(best: Forecast, other: Forecast) -> str:
    grown = {name: size - best.memory[name] for name, size in other.memory.items()}
    name = max(grown, key=lambda one: grown[one])
    return name if grown[name] > 0 else max(other.memory, key=lambda one: other.memory[one])


def _difference(best: Forecast, other: Forecast) -> str:
    grown = {name: seconds - best.seconds[name] for name, seconds in other.seconds.items()}
    least = 0.002 * best.step
    worse = sorted((name for name in grown if grown[name] > least), key=lambda one: -grown[one])[:2]
    better = [name for name in grown if grown[name] < -least]
    words = [f"+{show_seconds(grown[name])} {PARTS[name]}" for name in worse]
    if better:
        name = min(better, key=lambda one: grown[one])
        words.append(f"-{show_seconds(-grown[name])} {PARTS[name]}")
    if words:
        return ", ".join(words)
    saved = best.reserved - other.reserved
    if abs(saved) > 0.01 * best.room:
        return f"as fast, with {show_bytes(abs(saved))} {'less' if saved > 0 else 'more'} memory"
    return "no difference that counts"


def _reasons(ranking: Ranking) -> list[str]:
    best, question = ranking.best, ranking.question
    assert best is not None
    found = [_fastest(ranking, best)]
    if ranking.goal.by == "cost":
        found = [f"{best.plan} on {question.cluster} takes the least device time for each sample."]
    elif ranking.goal.by == "devices":
        found = [f"{question.cluster} is the smallest cluster within the bounds."]
    shares = sorted(best.seconds.items(), key=lambda one: -one[1])[:3]
    spent = ", ".join(f"{PARTS[name]} {seconds / best.step:.0%}" for name, seconds in shares if seconds)
    found.append(f"Its step: {spent}; model FLOP/s are {best.mfu:.0%} of the peak.")
    if len(ranking.plans) > 1:
        second = ranking.plans[1]
        told = _difference(best, second)
        found.append(f"The next mesh, {second.plan}, takes {second.step / best.step - 1:.1%} longer: {told}.")
        alike = [one for one in ranking.plans[1:] if tied(best, one)]
        if alike:
            found.append(
                f"{len(alike)} of the {len(ranking.plans) - 1} other meshes listed {'are' if len(alike) > 1 else 'is'} "
                "as fast as far as forecasts can tell (=): within the interval of the first. Only runs can tell them "
                "apart."
            )
    if best.plan.recompute != "none":
        found.append(
            f"It computes activations again (recompute={best.plan.recompute}) because without it memory would not do."
        )
    fewer = ranking.fewer
    if fewer is not None:
        apart = ("exchange", "pipeline", "replicas", "launches", "stragglers")
        added = PARTS[max(apart, key=lambda name: best.seconds.get(name, 0.0))]
        many = "one device is" if fewer.devices == 1 else f"{fewer.devices} devices are"
        found.insert(
            0,
            f"More devices do not help: {many} as fast or faster ({show_seconds(fewer.forecast.step)} a step, "
            f"{fewer.forecast.plan}); {added} is what the others add.",
        )
    return found


def _fastest(ranking: Ranking, best: Forecast) -> str:
    search = ranking.search
    if not best.safe:
        return (
            f"{best.plan} is forecast to be the fastest of {search.fitting} plans that fit, of {search.considered}; "
            f"none of them leaves a margin of memory: it runs out with a chance of {best.runs_out:.0%}."
        )
    return (
        f"{best.plan} is forecast to be the fastest of {search.safe} plans that run out of memory at most one time in "
        f"{1 / CHANCE:.0f}, of {search.fitting} plans that fit, of {search.considered}."
    )


def tied(best: Forecast, other: Forecast) -> bool:
    """Return True if ``other`` is as fast as ``best`` as far as its forecast can tell."""
    return other.step <= best.high


def _argued(ranking: Ranking, because: Plan, keys: Sequence[str]) -> Neighbour:
    best, question = ranking.best, ranking.question
    assert best is not None
    plan = _completed(question, because, keys)
    if plan is None:
        plan = because if "precision" in keys else replace(because, precision=question.precision)
        wrong = refusals(plan, question)
        if wrong:
            raise RefusedError(wrong)
    return _beside(best, question, plan, str(plan))


def _beside(best: Forecast, question: Question, plan: Plan, change: str) -> Neighbour:
    there = forecast(question.work, plan, question.cluster, question.preset)
    if there.plan == best.plan:
        return Neighbour(change=change, forecast=there, slower=0.0, why="it is the first plan")
    return differences(best, there, change)


def _completed(question: Question, because: Plan, keys: Sequence[str]) -> Plan | None:
    if set(keys) - {*SEARCHED, "precision"} or ("precision" in keys and because.precision != question.precision):
        return None
    found = search(question, {name: getattr(because, name) for name in keys})
    return found.best or found.leanest


def plan_and_keys(text: str) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan of a text, and its stated keys.

    Raises:
        SpecError: with every error in the text.
    """
    keys = tuple(word.partition("=")[0] for word in words(text) if "=" in word)
    return Plan.parse(text), keys
