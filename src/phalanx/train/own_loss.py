"""A loss computed by the model itself, as by models of transformers with ``labels``.

The model's class determines the count of the mean.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from phalanx.config import Job
from phalanx.config.losses import IGNORED, Loss, ModelLoss
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
_HEADS = {
    "ForCausalLM": SHIFTED,
    "LMHeadModel": SHIFTED,
    "ForMaskedLM": UNSHIFTED,
    "ForTokenClassification": UNSHIFTED,
    "ForSequenceClassification": UNSHIFTED,
    "ForImageClassification": UNSHIFTED,
}
"""How names of classes of transformers end → the outputs by which their loss is counted."""


def model_loss(*, count: Callable[[Any], Any] | None = None) -> ModelLoss:
    """Return the loss that reads the model's own: ``.loss`` of its output, ``["loss"]``, or a tuple's first entry.

    It has to be a mean with a known count: a mean of the means of micro-batches is not the mean of the batch. For
    models of transformers with a head for causal or masked language modelling, or for the classification of tokens,
    sequences or images, the count is known: the ``labels`` that are not -100. The batch has to have ``labels`` then,
    and the model has to be given them.

    Args:
        count: ``count(batch)`` returns the number of tokens or samples in the mean of this batch, a number or a scalar
            tensor; for models of any other class.

    Raises:
        SpecError: ``count`` is no function.
    """
    if count is not None and not callable(count):
        raise SpecError.of("count", repr(count), "a function of the batch, or None", COUNT)
    return _CountedMean(count)


def own_loss_problems(job: Job, module: nn.Module) -> list[Problem]:
    """Return the problems of a loss computed by ``module`` itself, as far as its class shows."""
    if not isinstance(job.loss, ModelLoss):
        return []
    whole: Any = module  # into which peft may have put adapters
    base = whole.get_base_model() if hasattr(module, "get_base_model") else whole
    config = getattr(base, "config", None)
    routers = [config, getattr(config, "text_config", None)]
    if any(getattr(one, "output_router_logits", False) is True for one in routers):
        given = f"px.model_loss() of a {type(base).__name__} that adds a loss of its router, no mean over tokens"
        allowed = "the model without it: px.load_balancing_loss adds up over any split"
        return [Problem(where="job.loss", given=given, allowed=allowed, fix="config.output_router_logits = False")]
    if job.loss.count is None and not _is_known(base):
        return [_unknown(f"a {type(base).__name__}")]
    return []


def _is_known(base: nn.Module) -> bool:
    forward = type(base).forward
    if not str(getattr(forward, "__module__", "")).startswith("transformers.models."):
        return False
    written = next(one for one in type(base).__mro__ if "forward" in vars(one))
    outputs = next((outputs for end, outputs in _HEADS.items() if written.__name__.endswith(end)), None)
    try:
        source = inspect.getsource(forward)
    except (OSError, TypeError):
        return False
    if outputs is None or "ignore_index" in source or getattr(base.config, "return_dict", True) is not True:
        return False
    library = "self.loss_function(" in source
    if library and not _is_library_loss(base, outputs):
        return False
    given = re.findall(r"return (\w+)\(", source)
    return (library or outputs is UNSHIFTED) and bool(given) and all(name in outputs for name in given)


def _is_library_loss(base: nn.Module, outputs: frozenset[str]) -> bool:
    from transformers.loss.loss_utils import LOSS_MAPPING

    kinds = ["ForCausalLM"] if outputs is SHIFTED else [end for end, has in _HEADS.items() if has is UNSHIFTED]
    return any(base.loss_function is LOSS_MAPPING[kind] for kind in kinds)


@final
@dataclass(frozen=True, slots=True)
class _CountedMean(ModelLoss):
    def __call__(self, output: Any, batch: Any) -> Any:
        mean = _own_loss(output, batch).float()
        count = _labels_counted(output, batch) if self.count is None else self.count(batch)
        if not hasattr(count, "to"):
            return Loss(mean * count if count else mean.nan_to_num() * 0, count)
        # Where nothing counts the mean is 0 / 0: a sum of nothing is 0.
        return Loss((mean * count).where(count.to(mean.device) != 0, 0.0), count)


def _own_loss(output: Any, batch: Any) -> Any:
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


def _unknown(what: str) -> Problem:
    allowed = (
        "a model of transformers for causal or masked language modelling or classification as its library has it, or "
        "count="
    )
    return Problem(where="job.loss", given=_UNKNOWN.format(what=what), allowed=allowed, fix=COUNT)
