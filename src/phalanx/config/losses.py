"""What a job's loss gives back, and whose it is: a function's, or the model's own; one term, or several by name.

Beside it a metric of an evaluation, which is computed once of all samples.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

from phalanx.config.fields import is_number, plan_problem
from phalanx.config.plan import Plan
from phalanx.errors import LossError, Problem, SpecError

EXAMPLE = 'px.Losses(losses, weights={"tokens": 1.0, "balance": 0.01})'
COUNTS = 'px.Losses(..., counts=lambda batch: {"tokens": (batch["labels"] != -100).sum()})'
IGNORED = -100
"""The label that does not count, as torch and transformers have it."""


class Loss(NamedTuple):
    """A loss as a sum and a count, so that any split of a batch adds up to the same number.

    A mean cannot be added up: the mean over 3 tokens and the mean over 5 are not the mean over 8. Sums and
    counts can: Phalanx adds both over micro-batches and ranks and divides once.

    Attributes:
        sum: scalar tensor, the loss summed over what is counted (tokens, samples, pixels). Backward runs on it.
        count: how many were summed: a number or a scalar tensor. May differ per micro-batch and may be 0.
    """

    sum: Any
    count: Any


@dataclass(frozen=True, slots=True)
class ModelLoss(ABC):
    """A loss that the model computes itself; ``px.model_loss`` makes it.

    Attributes:
        count: ``count(batch)`` gives the tokens or samples that the mean is over; ``None``: known by the model's class.
    """

    count: Callable[[Any], Any] | None = None

    @abstractmethod
    def __call__(self, output: Any, batch: Any) -> Loss:
        """The model's own mean, times what it is a mean over, of what the model gave for ``batch``."""


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
        function: ``function(output, batch)``, or with ``training`` as ``Job.loss``, gives a dict of name →
            ``Loss(sum, count)``, or a plain mean over the samples, with exactly the names of ``weights``.
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

    def __call__(self, output: Any, batch: Any, **flags: bool) -> NamedLosses:
        """Return the losses of one micro-batch.

        Raises:
            LossError: other names than those of ``weights`` are there.
        """
        found = self.function(output, batch, **flags)
        if not isinstance(found, Mapping) or set(found) != set(self.weights):
            raise LossError(
                f"the function {_gave(found)} with the names of weights: {_listed(self.weights)}\n    try: {EXAMPLE}"
            )
        return NamedLosses({name: found[name] for name in self.weights}, self.weights)

    def counted(self, batch: Any, samples: int) -> list[float]:
        """The counts of a micro-batch by ``counts``, in the order of the names.

        Raises:
            LossError: ``counts`` gives no dict, or names that are none of the losses.
        """
        assert self.counts is not None
        found = self.counts(batch)
        if not isinstance(found, Mapping) or set(found) - set(self.weights):  # pyrefly: ignore
            names = _listed(self.weights)
            raise LossError(f"counts {_gave(found)} of counts by names out of {names}\n    try: {COUNTS}")
        return [float(found.get(name, samples)) for name in self.weights]

    def total(self, means: Mapping[str, float]) -> float:
        """The weighted total of each one's mean."""
        return math.fsum(weight * means[name] for name, weight in self.weights.items())

    def __post_init__(self) -> None:
        if problems := _problems(self):
            raise SpecError(problems)
        object.__setattr__(self, "function", told_of_training(self.function))


class FlaggedLoss(partial[Any]):
    """A loss that takes ``training``: true unless ``in_evaluation`` says otherwise."""


def told_of_training(loss: Any) -> Any:
    """Return ``loss``, which is told that it is called in training where it has a parameter of that name."""
    try:
        takes = "training" in signature(loss).parameters and "training" not in getattr(loss, "keywords", {})
    except (TypeError, ValueError):  # of what is no function, or one of C
        takes = False
    return FlaggedLoss(loss, training=True) if takes else loss


def in_evaluation(loss: Any) -> dict[str, bool]:
    """Return what else ``loss`` is called with in an evaluation."""
    return {"training": False} if isinstance(getattr(loss, "function", loss), FlaggedLoss) else {}


def names_of(loss: Any) -> tuple[str, ...]:
    """The names of the losses that ``Job.loss`` gives; none where it gives a single one."""
    return loss.names if isinstance(loss, Losses) else ()


def loss_problems(loss: Any, loss_over: Any) -> list[Problem]:
    """What is wrong with ``job.loss``, a function, several losses or the model's own."""
    name, module = getattr(loss, "__name__", ""), str(getattr(loss, "__module__", ""))
    itself = name == "model_loss" and module.startswith("phalanx.")  # which has to be called to give a loss
    if itself or isinstance(loss, str):
        given = "px.model_loss itself" if itself else repr(loss)
        allowed = "px.model_loss(), called, for the model's own; or a function of the output and the batch"
        return [Problem(where="job.loss", given=given, allowed=allowed, fix="loss=px.model_loss()")]
    if not callable(loss):
        fix = "loss=lambda output, batch: px.cross_entropy(output, batch['label'])"
        return [Problem(where="job.loss", given=repr(loss), allowed="a function that builds it when called", fix=fix)]
    if isinstance(loss, ModelLoss) and loss_over == "batch":
        given = 'loss_over="batch" with px.model_loss(): the model computes it, of one micro-batch at a time'
        allowed = "a function of the outputs of the whole batch"
        return [Problem(where="job.loss", given=given, allowed=allowed, fix='loss_over="samples"')]
    if isinstance(loss, Losses) and loss.counts is not None and loss_over == "batch":
        given = 'px.Losses(counts=...) with loss_over="batch": losses of the whole batch have their counts at hand'
        return [Problem(where="job.loss", given=given, allowed="px.Losses without counts", fix=EXAMPLE)]
    return []


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


def _gave(found: Any) -> str:
    given = f"the names {_listed(found)}" if isinstance(found, Mapping) else f"a {type(found).__name__}"
    return f"of px.Losses gave {given}; it gives a dict"


def _listed(names: Any) -> str:
    return ", ".join(map(str, names)) or "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """What ``job.metrics`` gives for a metric that is no ratio of sums, such as F1, perplexity or AUC.

    Each call gives what is known of some of the samples; ``compute`` is called once in an evaluation, with all of it.

    Attributes:
        compute: ``compute(name=tensor, ...)`` with a tensor on the host for each name of ``sums`` and ``rows`` gives
            the metric: a number, or a dict of name → number, which are logged as ``metric.name``.
        sums: name → a tensor that is added up over all samples: counts of right and wrong answers, a confusion matrix.
            ``compute`` gets whole numbers as int64, others as float64.
        rows: name → a tensor of at least one dimension, of which all are joined along the first, in the order of the
            evaluation data: scores and labels. They are held on the host until the evaluation ends.

    Raises:
        SpecError: if ``compute`` is no function, or there is nothing to compute from, or a name is in both.
    """

    compute: Callable[..., Any]
    sums: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rows: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        problems: list[Problem] = []

        def wrong(name: str, given: Any, allowed: str) -> None:
            fix = "px.Metric(sums={'right': right, 'all': count}, compute=lambda right, all: right / all)"
            problems.append(Problem(where=f"metric.{name}", given=str(given), allowed=allowed, fix=fix))

        if not callable(self.compute):
            wrong("compute", repr(self.compute), "a function of what was added up and collected")
        for name in ("sums", "rows"):
            given: Any = getattr(self, name)
            if not hasattr(given, "items") or not all(type(key) is str for key in given):
                wrong(name, type(given).__name__, "a dict of name → tensor")
        if not problems and (both := sorted({*self.sums} & {*self.rows})):
            wrong("rows", ", ".join(both), "names that sums does not have")
        if not problems and not (self.sums or self.rows):
            wrong("sums", "neither sums nor rows", "a dict of name → tensor, or rows")
        if problems:
            raise SpecError(problems)
