"""The losses of a job: a function's or the model's own, one term or several by name; and metrics of an evaluation."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

from phalanx.config.fields import SelfChecked, Veto, is_number, option, plan_problem, shown
from phalanx.config.plan import Plan
from phalanx.errors import LossError, Problem

EXAMPLE = 'px.Losses(losses, weights={"tokens": 1.0, "balance": 0.01})'
COUNTS = 'px.Losses(..., counts=lambda batch: {"tokens": (batch["labels"] != -100).sum()})'
IGNORED = -100
"""The label that does not count, as torch and transformers have it."""


class Loss(NamedTuple):
    """A loss as a sum and a count, so that any split of a batch adds up to the same number.

    Means cannot be added up; sums and counts can. Phalanx adds both over micro-batches and ranks and divides once.

    Attributes:
        sum: scalar tensor, the loss summed over tokens, samples or pixels. Backward runs on it.
        count: terms of the sum: a number or a scalar tensor. May differ per micro-batch and may be 0.
    """

    sum: Any
    count: Any


@dataclass(frozen=True, slots=True)
class ModelLoss(ABC):
    """A loss that the model computes itself; ``px.model_loss`` makes it.

    Attributes:
        count: ``count(batch)`` gives the tokens or samples of the mean; ``None``: known by the model's class.
    """

    count: Callable[[Any], Any] | None = None

    @abstractmethod
    def __call__(self, output: Any, batch: Any) -> Loss:
        """Return the model's own mean for ``batch``, times the count that it is over."""


class NamedLosses(NamedTuple):
    """The result of ``Losses`` for one micro-batch: name → a sum and a count, or a mean; and the weights."""

    losses: Mapping[str, Any]
    weights: Mapping[str, float]


def _is_weights(given: Any) -> bool:
    names = dict(given) if hasattr(given, "items") else {}
    named = all(isinstance(name, str) and name not in ("", "loss") for name in names)
    return bool(names) and named and all(map(is_number, names.values()))


@dataclass(frozen=True, slots=True)
class Losses(SelfChecked, where="losses"):
    """A ``Job.loss`` of several terms: the sum of each term's weight times its mean over the global batch.

    Step events and evaluations have each term by its name, without its weight; ``loss`` is the weighted total. The
    count of the first term is the step's. If the counts of two terms differ and a plan splits the batch, ``counts``
    must give them before backward.

    Attributes:
        function: ``function(output, batch)``, or with ``training`` as ``Job.loss``, gives a dict of name →
            ``Loss(sum, count)``, or a plain mean over the samples, with exactly the names of ``weights``.
        weights: name → factor of its mean in the total, in the order in which losses are logged.
        counts: ``counts(batch)`` gives a dict of name → the count that its ``Loss`` will have; by default the samples.

    Raises:
        SpecError: with every field that is wrong.
    """

    function: Callable[[Any, Any], Mapping[str, Any]] = field(metadata={"example": EXAMPLE})
    weights: Mapping[str, float] = field(
        metadata={
            "accepts": _is_weights,
            "allowed": "names → finite numbers, one at least; loss is the name of their total",
            "example": EXAMPLE,
        }
    )
    counts: Callable[[Any], Mapping[str, Any]] | None = option(None, COUNTS)

    def settle(self) -> None:
        """Pass ``training`` to the function if it has a parameter of that name."""
        object.__setattr__(self, "function", told_of_training(self.function))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the losses, in order."""
        return tuple(self.weights)

    def __call__(self, output: Any, batch: Any, **flags: bool) -> NamedLosses:
        """Return the losses of one micro-batch.

        Raises:
            LossError: the names are not those of ``weights``.
        """
        found = self.function(output, batch, **flags)
        if not isinstance(found, Mapping) or set(found) != set(self.weights):
            raise LossError(
                f"the function {_gave(found)} with the names of weights: {_listed(self.weights)}\n    try: {EXAMPLE}"
            )
        return NamedLosses({name: found[name] for name in self.weights}, self.weights)

    def counted(self, batch: Any, samples: int) -> list[float]:
        """Return the counts of a micro-batch by ``counts``, in the order of the names.

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
        """Return the weighted total of the means."""
        return math.fsum(weight * means[name] for name, weight in self.weights.items())


class FlaggedLoss(partial[Any]):
    """A loss that takes ``training``: true unless ``in_evaluation`` says otherwise."""


def told_of_training(loss: Any) -> Any:
    """Return ``loss`` with ``training=True`` if it has a parameter of that name."""
    try:
        takes = "training" in signature(loss).parameters and "training" not in getattr(loss, "keywords", {})
    except (TypeError, ValueError):  # no function, or one of C
        takes = False
    return FlaggedLoss(loss, training=True) if takes else loss


def in_evaluation(loss: Any) -> dict[str, bool]:
    """Return the further arguments of ``loss`` in an evaluation."""
    return {"training": False} if isinstance(getattr(loss, "function", loss), FlaggedLoss) else {}


def names_of(loss: Any) -> tuple[str, ...]:
    """Return the names of the losses of ``Job.loss``; none for a single loss."""
    return loss.names if isinstance(loss, Losses) else ()


def is_model_loss(loss: Any) -> bool:
    """Return True if ``loss`` is ``px.model_loss`` itself, which must be called to give a loss."""
    name, module = getattr(loss, "__name__", ""), str(getattr(loss, "__module__", ""))
    return name == "model_loss" and module.startswith("phalanx.")


PLAIN_LOSS = "loss=lambda output, batch: px.cross_entropy(output, batch['label'])"
LOSS = {
    "accepts": lambda given: callable(given) and not is_model_loss(given),
    "allowed": "a function of the output and the batch; or px.model_loss(), called, for the model's own",
    "example": lambda given: "loss=px.model_loss()" if isinstance(given, str) or is_model_loss(given) else PLAIN_LOSS,
}
"""Metadata of ``Job.loss``."""

LOSS_RULES = (
    Veto(
        "loss",
        lambda job: isinstance(job.loss, ModelLoss) and job.loss_over == "batch",
        'loss_over="batch" with px.model_loss(), which the model computes for each micro-batch',
        "a function of the outputs of the whole batch",
        'loss_over="samples"',
    ),
    Veto(
        "loss",
        lambda job: isinstance(job.loss, Losses) and job.loss.counts and job.loss_over == "batch",
        'px.Losses(counts=...) with loss_over="batch": counts are at hand',
        "px.Losses without counts",
        lambda _: EXAMPLE,
    ),
)
"""Rules of a job about its loss."""


def counts_problems(loss: Any, plan: Plan) -> list[Problem]:
    """Return the problem of a plan under which no rank sums ``counts`` over the global batch."""
    if not isinstance(loss, Losses) or loss.counts is None or not (plan.server or plan.sync != "each"):
        return []
    if plan.server:
        given = "servers for px.Losses(counts=...): workers compute pieces one by one, and know of no other's counts"
        return [plan_problem("server", given, "plans without servers, or losses of one count", f"dp={plan.dp}")]
    given = f"sync={plan.sync} for px.Losses(counts=...): replicas step by themselves, each with counts of its own"
    return [plan_problem("sync", given, "sync=each, or losses of one count", "sync=each")]


def _gave(found: Any) -> str:
    given = f"the names {_listed(found)}" if isinstance(found, Mapping) else f"a {type(found).__name__}"
    return f"of px.Losses gave {given}; it gives a dict"


def _listed(names: Any) -> str:
    return ", ".join(map(str, names)) or "none"


_METRIC_RULES = (
    Veto(
        "rows",
        lambda one: {*one.sums} & {*one.rows},
        lambda one: ", ".join(sorted({*one.sums} & {*one.rows})),
        "names that sums does not have",
        "",
    ),
    Veto("sums", lambda one: not (one.sums or one.rows), "neither sums nor rows", "names → tensors", ""),
)
_METRIC = "px.Metric(sums={{'right': right, 'all': count}}, compute=lambda right, all: right / all)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric(SelfChecked, where="metric", call=_METRIC, rules=_METRIC_RULES):
    """A metric that is no ratio of sums, such as F1, perplexity or AUC, for ``job.metrics``.

    Each call gives the sums and rows of some samples; ``compute`` is called once in an evaluation, with all of them.

    Attributes:
        compute: ``compute(name=tensor, ...)`` with a tensor on the host for each name of ``sums`` and ``rows`` gives
            a number, or a dict of name → number, logged as ``metric.name``.
        sums: name → a tensor that is added up over all samples, such as a confusion matrix. ``compute`` gets whole
            numbers as int64, others as float64.
        rows: name → a tensor of at least one dimension, joined along the first in the order of the evaluation data,
            such as scores and labels. They are held on the host until the evaluation ends.
    """

    compute: Callable[..., Any]
    sums: Mapping[str, Any] = field(default_factory=dict[str, Any], metadata={"allowed": "names → tensors"})
    rows: Mapping[str, Any] = field(default_factory=dict[str, Any], metadata={"allowed": "names → tensors"})

    def given(self, name: str) -> str:
        """Return the type of sums and rows, which are too long to print."""
        return shown(self.compute) if name == "compute" else type(getattr(self, name)).__name__
