"""Learning-rate schedules, counted in optimizer steps or samples, never in processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from phalanx.config.fields import is_number, is_whole
from phalanx.errors import Problem, SpecError

Decay = Literal["constant", "linear", "cosine", "step"]

_OWN = "function=lambda step: 0.99**step"
_STEPWISE = 'decay="step", milestones=(1000, 2000), gamma=0.1'
_USED_BY: dict[str, tuple[str, ...]] = {
    "milestones": ("step",),
    "gamma": ("step",),
    "floor": ("linear", "cosine"),
    "total_steps": ("linear", "cosine"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The factor on every learning rate at a given step.

    The factor rises from near 0 to 1 over the warm-up, then falls to ``floor`` by ``decay``; or it is what ``function``
    gives, which the warm-up multiplies.

    Attributes:
        decay: ``constant``, ``linear``, ``cosine``, or ``step`` (times ``gamma`` at each milestone).
        warmup_steps: optimizer steps of linear warm-up.
        warmup_samples: the same in samples; give one or the other.
        total_steps: optimizer steps until ``floor`` is reached; ``None``: the length of the run.
        floor: the last factor of ``linear`` and ``cosine``.
        milestones: optimizer steps at which ``step`` decays.
        gamma: the factor ``step`` multiplies by at each milestone.
        function: in place of a decay, ``function(step)`` gives the factor of that optimizer step, 0 is the first: of
            the step alone, so that a run which goes on has the rates that it would have had.
    """

    decay: Decay = "constant"
    warmup_steps: int = 0
    warmup_samples: int = 0
    total_steps: int | None = None
    floor: float = 0.0
    milestones: tuple[int, ...] = ()
    gamma: float = 0.1
    function: Callable[[int], Any] | None = None

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise SpecError(problems)

    @classmethod
    def of(cls, given: Schedule | Callable[[int], Any]) -> Schedule:
        """``given``, of which a function stands for a schedule of that function."""
        return given if isinstance(given, Schedule) else cls(function=given)

    def factor(self, *, step: int, batch: int, total_steps: int) -> float:
        """The factor for optimizer step ``step`` (0 is the first) at ``batch`` samples a step.

        ``total_steps`` is the length of the run, used where the schedule states none of its own.

        Raises:
            SpecError: if ``function`` gives anything but a finite number, 0 or more.
        """
        warmup = self.warmup_samples / batch if self.warmup_samples else self.warmup_steps
        rise = min(1.0, (step + 1) / warmup) if step < warmup else 1.0
        if self.function is not None:
            found = self.function(step)
            if problem := _misfit(found, step):
                raise SpecError([problem])
            return rise * float(found)
        if step < warmup:
            return rise
        if self.decay == "step":
            return self.gamma ** sum(step >= milestone for milestone in self.milestones)
        if self.decay == "constant":
            return 1.0
        total = self.total_steps if self.total_steps is not None else total_steps
        progress = min(1.0, (step - warmup) / max(1.0, total - warmup))
        shape = 1.0 - progress if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.floor + (1.0 - self.floor) * shape


def _misfit(found: Any, step: int) -> Problem | None:
    """What is wrong with what a schedule's function gave for ``step``; a tensor or an array of one number is one."""
    try:
        factor = float(found)
    except (TypeError, ValueError, RuntimeError):
        factor = math.nan
    if math.isfinite(factor) and factor >= 0:
        return None
    given = f"a function that gives {found!r:.60} for step {step}"
    allowed = "a factor on the learning rate: a finite number, 0 or more"
    return Problem(where="schedule.function", given=given, allowed=allowed, fix=f"px.Schedule({_OWN})")


def _problems(schedule: Schedule) -> list[Problem]:
    found: list[Problem] = []

    def wrong(name: str, allowed: str, fix: str) -> None:
        given = repr(getattr(schedule, name))
        found.append(Problem(where=f"schedule.{name}", given=given, allowed=allowed, fix=f"px.Schedule({fix})"))

    decays = get_args(Decay)
    if schedule.decay not in decays:
        wrong("decay", ", ".join(decays), 'decay="cosine"')
    for name in ("warmup_steps", "warmup_samples"):
        if not is_whole(getattr(schedule, name), 0):
            wrong(name, "a whole number, 0 or more", f"{name}=100")
    if schedule.total_steps is not None and not is_whole(schedule.total_steps, 1):
        wrong("total_steps", "a whole number, 1 or more, or None", 'decay="cosine", total_steps=1000')
    if not is_number(schedule.floor) or not 0 <= schedule.floor <= 1:
        wrong("floor", "a factor from 0 to 1", 'decay="cosine", floor=0.1')
    if not is_number(schedule.gamma) or not 0 < schedule.gamma <= 1:
        wrong("gamma", "a factor above 0, and 1 at most", _STEPWISE)
    given: Any = schedule.milestones
    if not (isinstance(given, tuple | list) and all(is_whole(one, 1) for one in given)):
        wrong("milestones", "optimizer steps: whole numbers, 1 or more", _STEPWISE)
    if schedule.function is not None and not callable(schedule.function):
        wrong("function", "a function of the step, or None", _OWN)
    if found:
        return found

    if schedule.function is not None:
        if schedule.decay != "constant":
            wrong("decay", "one of the two: a decay, or a function of your own", _OWN)
        problem = _misfit(schedule.function(0), 0)
        found += [problem] if problem else []
    if schedule.warmup_steps and schedule.warmup_samples:
        wrong("warmup_samples", "one of warmup_steps and warmup_samples", "warmup_steps=100")
    if schedule.decay == "step" and not schedule.milestones:
        wrong("milestones", "the steps at which to decay", _STEPWISE)
    default = {field.name: field.default for field in fields(Schedule)}
    for name, decays in _USED_BY.items():
        if getattr(schedule, name) != default[name] and schedule.decay not in decays:
            fix = _STEPWISE if "step" in decays else f'decay="cosine", {name}={getattr(schedule, name)}'
            wrong(name, f"only with decay {' or '.join(decays)}, not with {schedule.decay}", fix)
    return found
