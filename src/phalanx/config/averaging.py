"""Averaged weights, as a job asks for them: which steps are averaged, how, and what plans cannot keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from phalanx.config.fields import is_number, is_whole, plan_problem
from phalanx.errors import Problem, SpecError

if TYPE_CHECKING:
    from phalanx.config.plan import Plan

AverageKind = Literal["ema", "mean"]
_KINDS = get_args(AverageKind)
_DECAY = 0.999


@dataclass(frozen=True, kw_only=True, slots=True)
class Average:
    """An average of the weights that a training goes through, kept beside them.

    What is averaged are the weights after the optimizer steps ``start``, ``start + every``, ``start + 2 * every`` and
    so on; one whose update was skipped is left out. The first of them is where the average begins. Only parameters are
    averaged. Buffers, such as the running statistics of BatchNorm, are copied with each average, as torch's
    ``AveragedModel`` does by default: they belong to the weights of that step, not to their average.

    Attributes:
        kind: ``ema``, an exponential moving average: ``decay * average + (1 - decay) * weights``; or ``mean``, the
            mean of all of them so far (stochastic weight averaging, SWA; Izmailov et al. 2018).
        decay: of ``ema``, between 0 and 1; 0.999 where not given.
        start: optimizer steps taken when the first weights are averaged; 0 stands for the first that ``every`` gives.
        every: optimizer steps between those that are averaged.
        evaluate: whether evaluations use the average, as soon as there is one, in place of the weights as they are.

    Raises:
        SpecError: if an attribute is none of these.
    """

    kind: AverageKind = "ema"
    decay: float | None = None
    start: int = 0
    every: int = 1
    evaluate: bool = True

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise SpecError(problems)

    @property
    def factor(self) -> float:
        """What an exponential moving average keeps of itself in each update."""
        return _DECAY if self.decay is None else self.decay

    @property
    def begins(self) -> str:
        """When it begins, in words."""
        return f"the first is due after step {self.start or self.every}"

    def takes(self, step: int) -> bool:
        """Return True if the weights after ``step`` optimizer steps are averaged."""
        return step >= max(self.start, 1) and (step - self.start) % self.every == 0


def _problems(average: Average) -> list[Problem]:
    found: list[Problem] = []

    def wrong(name: str, allowed: str, fix: str) -> None:
        given = repr(getattr(average, name))
        found.append(Problem(where=f"average.{name}", given=given, allowed=allowed, fix=f"px.Average({fix})"))

    if average.kind not in _KINDS:
        wrong("kind", ", ".join(_KINDS), 'kind="mean", start=1000')
    elif average.kind != "ema" and average.decay is not None:
        wrong("decay", f"only with kind=ema: the {average.kind} weighs all alike", 'kind="mean", start=1000')
    elif average.decay is not None and not (is_number(average.decay) and 0 < average.decay < 1):
        wrong("decay", "a number between 0 and 1, without them", f"decay={_DECAY}")
    if not is_whole(average.start, 0):
        wrong("start", "optimizer steps: a whole number, 0 or more", "start=1000")
    if not is_whole(average.every, 1):
        wrong("every", "optimizer steps: a whole number, 1 or more", "every=10")
    if not isinstance(average.evaluate, bool):
        wrong("evaluate", "True or False", "evaluate=False")
    return found


def never_averaged(average: Average | None, total_steps: int | None) -> list[str]:
    """One sentence where a run of ``total_steps`` ends before the first average; ``None`` steps: not known."""
    if average is None or total_steps is None or total_steps >= (average.start or average.every):
        return []
    return [f"average: none will be made in {total_steps} steps; {average.begins}."]


def average_problems(average: Average | None, plan: Plan) -> list[Problem]:
    """What keeps ``plan`` from averaging weights over its steps."""
    if average is None:
        return []
    asked = "a job with average=px.Average(...)"
    if plan.server:
        given = f"servers for {asked}: they step parameters piece by piece, and no process has those of one step"
        return [plan_problem("server", given, "plans without servers", f"dp={plan.dp}")]
    if plan.sync != "each":
        given = (
            f"sync={plan.sync} for {asked}: replicas step by themselves, and between two averagings there are no "
            "weights of the whole run that could be averaged"
        )
        return [plan_problem("sync", given, "sync=each", "sync=each")]
    return []
