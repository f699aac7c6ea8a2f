"""The arguments of ``compile`` as a loss and metrics that add up over any split of a batch.

Keras reduces a loss to a mean within each batch. A mean of means is another number if batches differ in size, masks or
weights; so each loss is taken as its sum and Keras's divisor, and divided once.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportIncompatibleMethodOverride=false
# Keras has no types that hold for the backend that it runs on.

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from operator import and_
from typing import Any

import keras
import torch
from keras import ops
from keras.src import backend
from keras.src.losses.loss import squeeze_or_expand_to_same_rank
from keras.src.metrics.reduction_metrics import Mean, MeanMetricWrapper
from keras.src.trainers.compile_utils import CompileLoss, CompileMetrics
from torch import Tensor
from torch.utils._pytree import tree_leaves

from phalanx.config import Loss, Metric
from phalanx.errors import LossError, SpecError
from phalanx.train.keras.keras_data import rows_of
from phalanx.train.keras.keras_module import KerasOutput
from phalanx.train.keras.keras_own import is_keras_code
from phalanx.train.keras.layer_modules import on_device_of, put_masks

_MEANS = ("sum_over_batch_size", "mean")


@dataclass(frozen=True, slots=True)
class _Term:
    """One loss of one micro-batch."""

    total: Any
    count: Any
    even: bool  # whether the count is so many for each sample


class _Summed:
    """A stand-in for a Keras loss that keeps its sum and count."""

    def __init__(self, loss: Any, batch: int, terms: threading.local) -> None:
        self._loss, self._batch, self._terms = loss, batch, terms

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        term = self._term(y_true, y_pred, sample_weight)
        self._terms.found.append(term)
        return term.total / term.count

    def _term(self, y_true: Any, y_pred: Any, weight: Any) -> _Term:
        """Compute like ``keras.losses.Loss.__call__`` and ``reduce_weighted_values``, up to the division."""
        loss = self._loss
        masks = [backend.get_keras_mask(y_pred)]
        samples = len(y_pred)
        y_pred, y_true = (ops.convert_to_tensor(one, dtype=loss.dtype) for one in (y_pred, y_true))
        values = loss.call(y_true, y_pred)
        masks.append(backend.get_keras_mask(values))  # of the loss itself, such as by ``ignore_class``
        known = [one for one in masks if one is not None]
        mask = reduce(and_, known) if known else None
        values = ops.convert_to_tensor(values, dtype=loss.dtype)
        if not values.dim():
            raise LossError(
                f"the loss {loss.name!r} gives one number for a batch; a mean of such numbers is that of no larger "
                f"batch.\n    try: one that gives a number for each sample, such as {_instead(loss)}"
            )
        weight = None if weight is None else ops.convert_to_tensor(weight, dtype=values.dtype)
        count: Any = values.numel()
        even = True
        if mask is not None:
            real = ops.cast(mask, values.dtype)
            if loss.reduction in _MEANS:
                count, even = real.sum() * (values.numel() / mask.numel()), False
            if weight is not None:
                real, weight = squeeze_or_expand_to_same_rank(real, weight)
                weight = weight * real
            else:
                weight = real
        if weight is not None:
            values, weight = squeeze_or_expand_to_same_rank(values, weight)
            values = values * weight
        if loss.reduction == "mean_with_sample_weight" and weight is not None:
            count, even = weight.sum(), False
        if loss.reduction == "sum":
            count = samples / self._batch  # comes to 1 over the global batch
        return _Term(values.sum(), count, even)


@dataclass(frozen=True, slots=True)
class _OfSamples:
    """A metric function with a number for each sample; means over batches cannot be joined to larger batches."""

    function: Any
    name: str

    def __call__(self, *given: Any, **how: Any) -> Any:
        values = ops.convert_to_tensor(self.function(*given, **how))
        if not values.dim():
            allowed = "functions that give a number for each sample, whose mean is the same however batches are split"
            raise SpecError.of("metrics", f"{self.name!r}, one number for a batch", allowed, "ops.mean(..., axis=-1)")
        return values


class _NoMetric:
    """A stand-in for the mean that Keras keeps of each of several losses."""

    def update_state(self, *_: Any, **__: Any) -> None: ...


@dataclass(slots=True)
class Compiled:
    """The losses and metrics that a model was compiled with.

    Attributes:
        loss: as ``compile`` got it.
        loss_weights: as ``compile`` got it.
        metrics: as ``compile`` got it.
        weighted_metrics: as ``compile`` got it.
        output_names: of the model's outputs.
        batch: the global batch, in samples.
    """

    loss: Any
    loss_weights: Any
    metrics: Any
    weighted_metrics: Any
    output_names: Any
    batch: int
    _made: CompileLoss | None = field(default=None, init=False)
    _terms: threading.local = field(default_factory=threading.local, init=False)

    def loss_of(self, output: Any, batch: Any) -> Any:
        """Return a sum and a count of one loss, or the mean over samples of several, for ``Job.loss``.

        Raises:
            LossError: a loss gives one number for a batch, or several are counted otherwise than by samples.
        """
        output, penalty = _parts(output)
        with on_device_of(output):
            self._terms.found = []
            total = self._losses()(rows_of(batch, "y"), output, rows_of(batch, "weight"))
            found: list[_Term] = self._terms.found
        if len(found) > 1:
            if not all(term.even for term in found):
                raise LossError(
                    "several losses, of which one is counted by weights or by a mask: each has a mean of its own over "
                    'the global batch.\n    try: reduction="sum_over_batch_size" and no masks; or px.Losses in the job'
                )
            return total if penalty is None else total + penalty
        total, count = found[0].total * self._weight, found[0].count
        return Loss(total if penalty is None else total + penalty * count, count)

    def metrics_of(self, output: Any, batch: Any) -> dict[str, Any]:
        """Return each metric's sum and count, or its state and computation, for ``Job.metrics``."""
        output, _ = _parts(output)
        y, weight = rows_of(batch, "y"), rows_of(batch, "weight")
        with on_device_of(output), torch.no_grad():
            made = CompileMetrics(self.metrics, self.weighted_metrics, output_names=self.output_names)
            made.build(y, output)
            for _, metric in _named(made):
                if isinstance(metric, MeanMetricWrapper) and not isinstance(metric._fn, _OfSamples):
                    metric._fn = _OfSamples(metric._fn, metric.name)
            made.reset_state()
            made.update_state(y, output, sample_weight=weight)
            return {name: _additive(metric) for name, metric in _named(made)}

    @property
    def _weight(self) -> Any:
        assert self._made is not None
        weight = self._made._flat_losses[0].loss_weights  # pyrefly: ignore
        return 1.0 if weight is None else weight

    def _losses(self) -> CompileLoss:
        if self._made is None:
            made = CompileLoss(self.loss, self.loss_weights, output_names=self.output_names)
            # It looks at structures and ranks when it is first called; what it makes of them holds from then on.
            made.build = self._built(made, made.build)
            self._made = made
        return self._made

    def _built(self, made: CompileLoss, build: Any) -> Any:
        def builds(y_true: Any, y_pred: Any) -> None:
            build(y_true, y_pred)
            flat: Any = made._flat_losses
            made._flat_losses = [one._replace(loss=_Summed(one.loss, self.batch, self._terms)) for one in flat]
            made._metrics[:] = [_NoMetric()] * len(made._metrics)

        return builds


def _parts(given: Any) -> tuple[Any, Any]:
    if not isinstance(given, KerasOutput):
        return given, None
    if given.masks is not None:
        put_masks(given.output, given.masks)
    return given.output, given.penalty


def _named(made: CompileMetrics) -> Iterator[tuple[str, Any]]:
    seen = Counter[str]()
    groups = [(group, "") for group in made._flat_metrics] + [(one, "weighted_") for one in made._flat_weighted_metrics]
    for group, weighted in groups:
        output = f"{group.output_name}_" if group and group.output_name else ""
        for metric in group.metrics if group else ():
            name = f"{output}{metric.name}"
            name = f"{output}{weighted}{metric.name}" if seen[name] else name
            seen[name] += 1
            yield f"{name}_{seen[name] - 1}" if seen[name] > 1 else name, metric


def _additive(metric: Any) -> Any:
    if not is_keras_code(type(metric)):
        given = f"{type(metric).__name__}, whose state cannot be added up over parts of a batch"
        allowed = "metrics of Keras, and functions that give a number for each sample"
        raise SpecError.of("metrics", given, allowed, "px.Metric(sums={...}, compute=...) in job.metrics")
    if isinstance(metric, Mean) and type(metric).result is Mean.result:  # RootMeanSquaredError takes a root of it
        return Loss(metric.total.value.detach().clone(), metric.count.value.detach().clone())
    names = [f"state_{at}" for at in range(len(metric.variables))]
    sums = {name: one.value.detach().clone() for name, one in zip(names, metric.variables, strict=True)}

    def compute(**found: Tensor) -> Any:
        for name, variable in zip(names, metric.variables, strict=True):
            variable.assign(found[name].to(variable.value))
        result = ops.convert_to_tensor(metric.result())
        return {str(at): float(one) for at, one in enumerate(result)} if result.dim() else float(result)

    return Metric(sums=sums, compute=compute)


def _instead(loss: Any) -> str:
    name = type(loss).__name__
    if name in ("Dice", "Tversky"):
        return f"keras.losses.{name}(axis=(1, 2, 3))"
    return "keras.losses.MeanSquaredError()"


def check_reduction(loss: Any) -> None:
    """Refuse losses without reduction to a number, or with their own way of reduction.

    Raises:
        SpecError: if there is one.
    """
    for one in tree_leaves(loss):
        if isinstance(one, keras.losses.Loss) and type(one).__call__ is not keras.losses.Loss.__call__:
            allowed = "losses whose call gives a number for each sample, and whose reduction is Keras' own"
            fix = f"call(self, y_true, y_pred) in {type(one).__name__}, and no __call__"
            raise SpecError.of("loss", f"{type(one).__name__}.__call__, a reduction of its own", allowed, fix)
        if isinstance(one, keras.losses.Loss) and one.reduction in (None, "none"):
            allowed = "sum_over_batch_size, mean, mean_with_sample_weight or sum"
            fix = f"keras.losses.{type(one).__name__}()"
            raise SpecError.of("loss", f"{type(one).__name__} with reduction={one.reduction!r}", allowed, fix)
