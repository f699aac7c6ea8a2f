"""Several losses in one step, each with a name and a weight: their weighted total is what is trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from phalanx.config.fields import is_number, plan_problem
from phalanx.config.plan import Plan
from phalanx.errors import LossError, Problem, SpecError

EXAMPLE = 'px.Losses(losses, weights={"tokens": 1.0, "balance": 0.01})'
COUNTS = 'px.Losses(..., counts=lambda batch: {"tokens": (batch["labels"] != -100).sum()})'


class NamedLosses(NamedTuple):
    """What ``Losses`` gives for one micro-batch: name → a sum and a count, or a mean, and what each weighs."""

    losses: Mapping[str, Any]
    weights: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Losses:
    """A ``Job.loss`` of several terms: what is trained on is the sum of each one's weight times its own mean.

    The mean of each is over the global batch: its sum over its count there, however the batch is split. Each stands in
    step events and in evaluations by its name, without its weight; ``loss`` is the weighted total. The first one's
    count is the step's.

    Where the counts of two names differ, and a plan splits the batch, they have to be known before backward:
    ``counts`` gives them.

    Attributes:
        function: ``function(output, batch)`` gives a dict of name → ``Loss(sum, count)``, or a plain mean over the
            samples, with exactly the names of ``weights``.
        weights: name → what its mean is multiplied by in the total, in the order in which losses are logged.
        counts: ``counts(batch)`` gives a dict of name → the count that its ``Loss`` will have, a number or a scalar
            tensor; a name that is not there counts the samples of the batch.

    Raises:
        SpecError: a field is of another kind.
    """

    function: Callable[[Any, Any], Mapping[str, Any]]
    weights: Mapping[str, float]
    counts: Callable[[Any], Mapping[str, Any]] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Of the losses, in order."""
        return tuple(self.weights)

    def __call__(self, output: Any, batch: Any) -> NamedLosses:
        """The losses of one micro-batch.

        Raises:
            LossError: other names than those of ``weights`` are there.
        """
        found = self.function(output, batch)
        if not isinstance(found, Mapping) or set(found) != set(self.weights):  # pyright: ignore
            given = f"the names {_listed(found)}" if isinstance(found, Mapping) else f"a {type(found).__name__}"  # pyright: ignore
            raise LossError(
                f"the function of px.Losses gave {given}; it gives a dict with the names of weights: "
                f"{_listed(self.weights)}\n    try: {EXAMPLE}"
            )
        return NamedLosses({name: found[name] for name in self.weights}, self.weights)

    def counted(self, batch: Any, samples: int) -> list[float]:
        """The counts of a micro-batch by ``counts``, in the order of the names.

        Raises:
            LossError: ``counts`` gives no dict, or names that are none of the losses.
        """
        assert self.counts is not None
        found = self.counts(batch)
        if not isinstance(found, Mapping) or set(found) - set(self.weights):  # pyright: ignore
            given = f"the names {_listed(found)}" if isinstance(found, Mapping) else f"a {type(found).__name__}"  # pyright: ignore
            raise LossError(
                f"counts of px.Losses gave {given}; it gives a dict of counts by names out of "
                f"{_listed(self.weights)}\n    try: {COUNTS}"
            )
        return [float(found.get(name, samples)) for name in self.weights]

    def total(self, means: Mapping[str, float]) -> float:
        """The weighted total of each one's mean."""
        return math.fsum(weight * means[name] for name, weight in self.weights.items())

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise SpecError(problems)


def names_of(loss: Any) -> tuple[str, ...]:
    """The names of the losses that ``Job.loss`` gives; none where it gives a single one."""
    return loss.names if isinstance(loss, Losses) else ()


def losses_problems(loss: Any, loss_over: Any) -> list[Problem]:
    """What is wrong with ``job.loss`` beside ``job.loss_over``, where it is a ``Losses``."""
    if not isinstance(loss, Losses) or loss.counts is None or loss_over != "batch":
        return []
    given = 'px.Losses(counts=...) with loss_over="batch": losses of the whole batch have their counts at hand'
    return [Problem(where="job.loss", given=given, allowed="px.Losses without counts", fix=EXAMPLE)]


def counts_problems(loss: Any, plan: Plan) -> list[Problem]:
    """Plans under which nobody adds up over the global batch what ``counts`` tells of a batch."""
    if not isinstance(loss, Losses) or loss.counts is None or not (plan.server or plan.sync != "each"):
        return []
    if plan.server:
        given = "servers for px.Losses(counts=...): workers compute pieces one by one, and know of no other's counts"
        return [plan_problem("server", given, "plans without servers, or losses of one count", f"dp={plan.dp}")]
    given = f"sync={plan.sync} for px.Losses(counts=...): replicas step by themselves, each with counts of its own"
    return [plan_problem("sync", given, "sync=each, or losses of one count", "sync=each")]


def _problems(losses: Losses) -> list[Problem]:
    found: list[Problem] = []

    def wrong(name: str, allowed: str, fix: str) -> None:
        given = repr(getattr(losses, name))
        found.append(Problem(where=f"losses.{name}", given=given, allowed=allowed, fix=fix))

    if not callable(losses.function):
        wrong("function", "a function of the output and the batch", EXAMPLE)
    given: Any = losses.weights
    weights: dict[Any, Any] = dict(given) if hasattr(given, "items") else {}
    if not weights or not all(isinstance(name, str) and name and name != "loss" for name in weights):
        wrong("weights", "names → numbers, one at least; none is called loss, as their total is", EXAMPLE)
    elif not all(is_number(weight) and math.isfinite(weight) for weight in weights.values()):
        wrong("weights", "finite numbers", EXAMPLE)
    if losses.counts is not None and not callable(losses.counts):
        wrong("counts", "a function of the batch, or None", COUNTS)
    return found


def _listed(names: Any) -> str:
    return ", ".join(map(str, names)) or "none"
