"""If no plan fits: the missing bytes, and the nearest changes that would fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from phalanx.config import Plan
from phalanx.errors import SpecError
from phalanx.forecast import forecast
from phalanx.hardware import cluster, entry, names
from phalanx.planner.question import Question, resized
from phalanx.planner.rank import neighbours
from phalanx.planner.rules import problems
from phalanx.planner.search import search
from phalanx.units import show_bytes

_MOST = 3
_DOUBLINGS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A change that would make it fit."""

    words: str  # the change, as on a command line
    plan: Plan  # that would then fit
    spare: float  # bytes it would leave on the device that needs most
    step: float  # seconds of its step

    def to_dict(self) -> dict[str, Any]:
        return {"change": self.words, "plan": str(self.plan), "spare": self.spare, "step": self.step}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortfall:
    """The missing memory.

    Attributes:
        plan: the one that needs least.
        missing: bytes it lacks on the fullest device.
        changes: the nearest that would fit, at most three.
    """

    plan: Plan
    missing: float
    changes: tuple[Change, ...]

    def to_dict(self) -> dict[str, Any]:
        changes = [one.to_dict() for one in self.changes]
        return {"plan": str(self.plan), "missing": self.missing, "changes": changes}

    def __str__(self) -> str:
        return f"{self.plan} lacks {show_bytes(self.missing)} on each device"


def shortfall(question: Question, plan: Plan | None = None) -> Shortfall | None:
    """Return the shortfall of ``plan``, by default of the smallest; ``None`` if there is no plan, or it fits."""
    given = plan or search(question).leanest
    if given is None:
        return None
    there = forecast(question.work, given, question.cluster, question.preset)
    if there.fits:
        return None
    changes = [*(_of_plan(question, given) if plan else ()), *_of_question(question, given)]
    unlike = {one.words: one for one in reversed(changes)}
    return Shortfall(plan=given, missing=there.missing, changes=tuple(reversed(unlike.values()))[:_MOST])


def _of_plan(question: Question, plan: Plan) -> list[Change]:
    found = [_priced(question, other, f'--plan "{other}"') for _, other in neighbours(plan, question)]
    fitting = sorted((one for one in found if one), key=lambda one: one.step)[:2]
    best = search(question).best if not fitting else None
    whole = _priced(question, best, f'--plan "{best}"') if best else None
    return [*fitting, *([whole] if whole else [])]


def _of_question(question: Question, plan: Plan) -> Iterator[Change]:
    for offload in ("optimizer", "parameters"):
        if offload == "optimizer" or plan.zero == 3:
            other = replace(plan, offload=offload)
            if not problems(other, question.work, question.cluster):
                yield from _found(_priced(question, other, f'--plan "{other}"'))
    if not question.mixed:
        yield from _found(_more_devices(question))
        yield from _found(_larger_devices(question))
    if plan.precision == "fp32" and all("bf16" in group.device.peak for group in question.cluster.groups):
        yield from _found(_best(replace(question, precision="bf16"), "--precision bf16"))
    length = question.work.tokens
    while question.work.profile.lawful and length > 256:
        length //= 2
        found = _best(replace(question, work=replace(question.work, length=length)), f"--seq {length}")
        if found:
            yield found
            return


def _more_devices(question: Question) -> Change | None:
    devices = question.cluster.devices
    for _ in range(_DOUBLINGS):
        devices *= 2
        there = resized(question.cluster, devices)
        if there is None:
            continue
        found = _best(replace(question, cluster=there), f"--on {there}")
        if found:
            return found
    return None


def _larger_devices(question: Question) -> Change | None:
    group = question.cluster.groups[0]
    known = [one.device for one in (entry(name) for name in names()) if one.device.kind == group.device.kind]
    larger = [device for device in known if device.room > group.device.room and question.precision in device.peak]
    for device in sorted(larger, key=lambda one: one.room):
        words = str(question.cluster).replace(group.device.name, device.name)
        try:
            found = _best(replace(question, cluster=cluster(words)), f"--on {words}")
        except SpecError:  # a node of it holds another number
            continue
        if found:
            return found
    return None


def _best(question: Question, words: str) -> Change | None:
    best = search(question).best
    return _priced(question, best, words) if best else None


def _priced(question: Question, plan: Plan, words: str) -> Change | None:
    there = forecast(question.work, plan, question.cluster, question.preset)
    if not there.fits:
        return None
    return Change(words=words, plan=plan, spare=-there.missing, step=there.step)


def _found(change: Change | None) -> Iterator[Change]:
    if change:
        yield change
