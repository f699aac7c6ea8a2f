"""The settings of a job's updates: learning-rate schedules, gradient clipping and averaged weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from phalanx.config.fields import SelfChecked, Veto, option, plan_problem
from phalanx.errors import Problem, SpecError

if TYPE_CHECKING:
    from phalanx.config.plan import Plan

Decay = Literal["constant", "linear", "cosine", "step"]
Per = Literal["all", "group"]
AverageKind = Literal["ema", "mean"]

_OWN = "function=lambda step: 0.99**step"
_STEPWISE = 'decay="step", milestones=(1000, 2000), gamma=0.1'
_DECAY = 0.999


_SCHEDULE_RULES = (
    Veto(
        "decay",
        lambda one: one.function is not None and one.decay != "constant",
        "{decay!r}",
        "one of the two: a decay, or a function of your own",
        _OWN,
    ),
    Veto(
        "warmup_samples",
        lambda one: one.warmup_steps and one.warmup_samples,
        "{warmup_samples}",
        "one of warmup_steps and warmup_samples",
        "warmup_steps=100",
    ),
    Veto(
        "milestones",
        lambda one: one.decay == "step" and not one.milestones,
        "{milestones}",
        "the steps at which to decay",
        _STEPWISE,
    ),
    *(
        Veto(
            name,
            lambda one, name=name, plain=plain: getattr(one, name) != plain and one.decay != "step",
            f"{{{name}!r}}",
            "only with decay step, not with {decay}",
            _STEPWISE,
        )
        for name, plain in (("milestones", ()), ("gamma", 0.1))
    ),
    *(
        Veto(
            name,
            lambda one, name=name, plain=plain: getattr(one, name) != plain and one.decay in ("constant", "step"),
            f"{{{name}!r}}",
            "only with decay linear or cosine, not with {decay}",
            f'decay="cosine", {name}={{{name}}}',
        )
        for name, plain in (("floor", 0.0), ("total_steps", None))
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule(SelfChecked, where="schedule", call="px.Schedule({})", rules=_SCHEDULE_RULES):
    """A factor on every learning rate, by optimizer step.

    It rises from near 0 to 1 over the warm-up, then falls to ``floor`` by ``decay``. A ``function`` replaces the decay.

    Attributes:
        decay: ``constant``, ``linear``, ``cosine``, or ``step`` (times ``gamma`` at each milestone).
        warmup_steps: optimizer steps of linear warm-up.
        warmup_samples: the same in samples; give one or the other.
        total_steps: optimizer steps until ``floor`` is reached; ``None``: the length of the run.
        floor: the last factor of ``linear`` and ``cosine``.
        milestones: optimizer steps at which ``step`` decays.
        gamma: the factor ``step`` multiplies by at each milestone.
        function: ``function(step)`` gives the factor of an optimizer step from 0 on, by the step alone.
    """

    decay: Decay = option("constant", 'decay="cosine"')
    warmup_steps: int = option(0, "warmup_steps=100", least=0)
    warmup_samples: int = option(0, "warmup_samples=100", least=0)
    total_steps: int | None = option(None, 'decay="cosine", total_steps=1000', least=1)
    floor: float = option(0.0, 'decay="cosine", floor=0.1', least=0, most=1)
    milestones: tuple[int, ...] = option((), _STEPWISE, least=1, allowed="optimizer steps: whole numbers, 1 or more")
    gamma: float = option(0.1, _STEPWISE, above=0, most=1)
    function: Callable[[int], Any] | None = option(None, _OWN)

    def more_problems(self) -> list[Problem]:
        """Return the problem of a first factor that cannot be used."""
        problem = _misfit(self.function(0), 0) if callable(self.function) else None
        return [problem] if problem else []

    @classmethod
    def of(cls, given: Schedule | Callable[[int], Any]) -> Schedule:
        """Return ``given``, or the schedule of that function."""
        return given if isinstance(given, Schedule) else cls(function=given)

    def factor(self, *, step: int, batch: int, total_steps: int) -> float:
        """Return the factor for ``step``, from 0 on, at ``batch`` samples a step, in a run of ``total_steps``.

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
    """Return the problem of a factor; a tensor or an array of one number is a factor too."""
    try:
        factor = float(found)
    except (TypeError, ValueError, RuntimeError):
        factor = math.nan
    if math.isfinite(factor) and factor >= 0:
        return None
    given = f"a function that gives {found!r:.60} for step {step}"
    allowed = "a factor on the learning rate: a finite number, 0 or more"
    return Problem(where="schedule.function", given=given, allowed=allowed, fix=f"px.Schedule({_OWN})")


def schedule_problems(given: Any) -> list[Problem]:
    """Return the problems of ``job.schedule``, a schedule or a function."""
    if not isinstance(given, Schedule) and not callable(given):
        allowed, fix = "a px.Schedule, or a function of the step", 'schedule=px.Schedule(decay="cosine")'
        return [Problem(where="job.schedule", given=repr(given), allowed=allowed, fix=fix)]
    try:
        Schedule.of(given)
    except SpecError as error:
        return list(error.problems)
    return []


_CLIP_RULES = (
    Veto(
        "",
        lambda one: (one.norm is None) == (one.value is None),
        "norm={norm}, value={value}",
        "one of the two",
        "norm=1.0",
    ),
    *(
        Veto(
            name,
            lambda one, name=name, plain=plain: one.norm is None and one.value and getattr(one, name) != plain,
            f"{{{name}!r}}",
            "only with norm: each value is clipped by itself",
            "value={value}",
        )
        for name, plain in (("norm_type", 2), ("per", "all"))
    ),
)


def _is_norm_type(given: Any) -> bool:
    return not isinstance(given, bool) and given in (2, math.inf)


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip(SelfChecked, where="clip", call="px.Clip({})", rules=_CLIP_RULES):
    """A limit on the gradients of the global batch, the same under every plan.

    Give ``norm`` or ``value``. A number alone as ``job.clip`` stands for ``Clip(norm=number)``.

    Attributes:
        norm: largest norm; larger gradients are scaled down to it, as by ``torch.nn.utils.clip_grad_norm_``.
        value: largest absolute value of each element, as by ``torch.nn.utils.clip_grad_value_``.
        norm_type: 2, or ``math.inf`` for the largest absolute value.
        per: the norm is over ``all`` gradients, or over those of each parameter ``group``.
    """

    norm: float | None = option(None, "norm=1.0", above=0)
    value: float | None = option(None, "value=1.0", above=0)
    norm_type: float = option(2.0, "norm=1.0, norm_type=math.inf", accepts=_is_norm_type, allowed="2, or math.inf")
    per: Per = option("all", 'norm=1.0, per="group"')

    @classmethod
    def of(cls, given: float | Clip | None) -> Clip | None:
        """Return ``given``, or the clip at the norm ``given`` of all gradients."""
        return given if given is None or isinstance(given, Clip) else cls(norm=float(given))

    @property
    def by_whole_norm(self) -> bool:
        """True if gradients are scaled by one factor of the L2 norm of all gradients."""
        return self.norm is not None and self.norm_type == 2 and self.per == "all"


_DECAYS = Veto(
    "decay",
    lambda one: one.kind != "ema" and one.decay is not None,
    "{decay}",
    "only with kind=ema: the {kind} weighs all alike",
    'kind="mean", start=1000',
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Average(SelfChecked, where="average", call="px.Average({})", rules=(_DECAYS,)):
    """An average of the weights over optimizer steps, kept beside them.

    It takes the weights after the steps ``start``, ``start + every``, ``start + 2 * every`` and so on, unless an update
    was skipped. Only parameters are averaged; buffers, such as the statistics of BatchNorm, are copied with each
    average, as by torch's ``AveragedModel``.

    Attributes:
        kind: ``ema``, an exponential moving average: ``decay * average + (1 - decay) * weights``; or ``mean``, the
            mean of all weights so far (stochastic weight averaging, SWA; Izmailov et al. 2018).
        decay: of ``ema``, between 0 and 1; 0.999 by default.
        start: first step whose weights are averaged; 0: step ``every``.
        every: optimizer steps from one average to the next.
        evaluate: evaluate the average, as soon as there is one, in place of the weights.
    """

    kind: AverageKind = option("ema", 'kind="mean", start=1000')
    decay: float | None = option(None, f"decay={_DECAY}", above=0, below=1)
    start: int = option(0, "start=1000", least=0)
    every: int = option(1, "every=10", least=1)
    evaluate: bool = option(True, "evaluate=False")

    @property
    def factor(self) -> float:
        """Share of itself that an exponential moving average keeps in each update."""
        return _DECAY if self.decay is None else self.decay

    @property
    def begins(self) -> str:
        """The time of the first average, in words."""
        return f"the first is due after step {self.start or self.every}"

    def takes(self, step: int) -> bool:
        """Return True if the weights after ``step`` optimizer steps are averaged."""
        return step >= max(self.start, 1) and (step - self.start) % self.every == 0


def never_averaged(average: Average | None, total_steps: int | None) -> list[str]:
    """Return a sentence if a run of ``total_steps`` ends before the first average; ``None`` steps: not known."""
    if average is None or total_steps is None or total_steps >= (average.start or average.every):
        return []
    return [f"average: none will be made in {total_steps} steps; {average.begins}."]


def average_problems(average: Average | None, plan: Plan) -> list[Problem]:
    """Return the problem of a plan without weights of the whole model after each step."""
    asked = "a job with average=px.Average(...)"
    if average is not None and plan.server:
        given = f"servers for {asked}: they step parameters piece by piece, and no process has those of one step"
        return [plan_problem("server", given, "plans without servers", f"dp={plan.dp}")]
    if average is not None and plan.sync != "each":
        given = (
            f"sync={plan.sync} for {asked}: replicas step by themselves, and between two averagings there are no "
            "weights of the whole run that could be averaged"
        )
        return [plan_problem("sync", given, "sync=each", "sync=each")]
    return []


def clip_problems(clip: Clip | None, plan: Plan) -> list[Problem]:
    """Return the problem of servers, each of which has some rows of a parameter group only."""
    if not plan.server or clip is None or clip.value is not None or clip.by_whole_norm:
        return []
    allowed = "px.Clip(value=...) and px.Clip(norm=...) of all gradients under servers; the others under plans without"
    fix = f"clip=px.Clip(norm={clip.norm})"
    return [Problem(where="job.clip", given=f"{clip} under {plan}", allowed=allowed, fix=fix)]
