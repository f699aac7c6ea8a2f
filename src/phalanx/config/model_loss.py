"""A loss that the model computes itself, as models of transformers do when they are given ``labels``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phalanx.config.loss import IGNORED, Loss
from phalanx.errors import LossError, Problem, SpecError

SHIFTED = frozenset(
    {"CausalLMOutput", "CausalLMOutputWithPast", "CausalLMOutputWithCrossAttentions", "MoeCausalLMOutputWithPast"}
)
"""Outputs of transformers whose loss is over the labels from the second of each row on."""
UNSHIFTED = frozenset(
    {
        "MaskedLMOutput",
        "TokenClassifierOutput",
        "SequenceClassifierOutput",
        "SequenceClassifierOutputWithPast",
        "ImageClassifierOutput",
        "ImageClassifierOutputWithNoAttention",
    }
)
"""Outputs of transformers whose loss is over all labels."""
COUNT = 'px.model_loss(count=lambda batch: (batch["labels"] != -100).sum())'


@dataclass(frozen=True, slots=True)
class ModelLoss:
    """Called as ``job.loss`` is: the model's own mean, times what it is a mean over. ``px.model_loss`` makes it.

    Attributes:
        count: ``count(batch)`` gives the tokens or samples that the mean is over; ``None``: known by the model's class.
    """

    count: Callable[[Any], Any] | None = None

    def __call__(self, output: Any, batch: Any) -> Any:
        """``Loss(sum, count)`` of what the model gave for ``batch``.

        Raises:
            LossError: the output holds no loss, or nobody knows what it is a mean over.
        """
        mean = _own_loss(output, batch).float()
        count = _labels_counted(output, batch) if self.count is None else self.count(batch)
        if not hasattr(count, "to"):
            return Loss(mean * count if count else mean.nan_to_num() * 0, count)
        # Where nothing counts the mean is 0 / 0: a sum of nothing is 0.
        return Loss((mean * count).where(count.to(mean.device) != 0, 0.0), count)


def model_loss(*, count: Callable[[Any], Any] | None = None) -> ModelLoss:
    """The loss that the model computes itself: ``.loss`` of its output, ``["loss"]``, or the first entry of a tuple.

    It has to be a mean, and what it is a mean over has to be known: a mean of the means of micro-batches is not the
    mean of the batch. Of models of transformers with a head for causal or masked language modelling, or for the
    classification of tokens, sequences or images, it is known: the ``labels`` that are not -100. The batch has to have
    ``labels`` then, and the model has to be given them.

    Args:
        count: ``count(batch)`` gives how many tokens or samples the mean of this batch is over, a number or a scalar
            tensor; for models of any other class.

    Raises:
        SpecError: ``count`` is no function.
    """
    if count is not None and not callable(count):
        raise SpecError.of("count", repr(count), "a function of the batch, or None", COUNT)
    return ModelLoss(count)


def loss_problems(loss: Any, loss_over: Any) -> list[Problem]:
    """What is wrong with ``job.loss``, a function or the model's own."""
    if loss is model_loss or isinstance(loss, str):
        given = "px.model_loss itself" if loss is model_loss else repr(loss)
        allowed = "px.model_loss(), called, for the model's own; or a function of the output and the batch"
        return [Problem(where="job.loss", given=given, allowed=allowed, fix="loss=px.model_loss()")]
    if not callable(loss):
        fix = "loss=lambda output, batch: px.cross_entropy(output, batch['label'])"
        return [Problem(where="job.loss", given=repr(loss), allowed="a function that builds it when called", fix=fix)]
    if isinstance(loss, ModelLoss) and loss_over == "batch":
        given = 'loss_over="batch" with px.model_loss(): the model computes it, of one micro-batch at a time'
        allowed = "a function of the outputs of the whole batch"
        return [Problem(where="job.loss", given=given, allowed=allowed, fix='loss_over="samples"')]
    return []


def _own_loss(output: Any, batch: Any) -> Any:
    """The scalar tensor that the model has computed."""
    by_name: Any = getattr(output, "get", None)
    if callable(by_name):
        loss: Any = by_name("loss")
    elif type(output) in (tuple, list):
        loss = output[0] if output else None
    else:
        loss = getattr(output, "loss", output)
    if getattr(loss, "shape", None) == ():
        return loss
    given = "None" if loss is None else f"a {type(loss).__name__}"
    if loss is not None and hasattr(loss, "shape"):
        given += f" of shape {tuple(loss.shape)}"
    keys = f"; the batch has {', '.join(map(str, batch))}" if hasattr(batch, "keys") else ""
    raise LossError(
        f"px.model_loss: the model's own loss is {given} in its {type(output).__name__}{keys}. Allowed: a scalar "
        'tensor, .loss, ["loss"] or the first of a tuple\n'
        '    try: a batch with "labels", which forward names, or inputs=lambda batch: dict(batch)'
    )


def _labels_counted(output: Any, batch: Any) -> Any:
    """How many labels the mean of ``output``, of a class of transformers, is over."""
    module, name = type(output).__module__, type(output).__name__
    if not module.startswith("transformers.") or name not in SHIFTED | UNSHIFTED:
        raise LossError(f"{_UNKNOWN.format(what=f'a {name}')}\n    try: {COUNT}")
    labels: Any = batch.get("labels") if hasattr(batch, "get") else None
    if not getattr(labels, "shape", None):
        raise LossError(
            'px.model_loss: the batch has no tensor "labels" to count\n    try: px.model_loss(count=lambda batch: ...)'
        )
    if labels.is_floating_point():
        return labels.shape[0]  # of a regression, or of several classes a sample: each sample weighs the same
    return ((labels[..., 1:] if name in SHIFTED else labels) != IGNORED).sum()


_UNKNOWN = "px.model_loss: what the model's own loss is a mean over is not known of {what}"


def unknown(what: str) -> Problem:
    """The problem that nobody knows what a mean by ``what`` is over."""
    allowed = (
        "a model of transformers for causal or masked language modelling or classification as its library has it, or "
        "count="
    )
    return Problem(where="job.loss", given=_UNKNOWN.format(what=what), allowed=allowed, fix=COUNT)
