"""Losses and metrics as a sum and a count, so that any split of a batch adds up to the same number.

Shapes: B samples, T positions, C classes or vocabulary. The class is the *last* axis of logits, as language models
give it. Sums are at least fp32, whatever precision the model computes in; nothing here returns a mean.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.errors import LossError
from phalanx.spec.loss import Loss

IGNORED = -100


def cross_entropy(
    output: Any, target: Tensor, *, ignore_index: int | None = IGNORED, label_smoothing: float = 0.0
) -> Loss:
    """Cross entropy summed over the targets that count.

    Args:
        output: logits of shape (B, C), (B, T, C) or any (..., C), or an object with such ``.logits``.
        target: classes of shape (B,), (B, T) or any (...), integer.
        ignore_index: the target value that does not count. ``None``: all count, and the count is a plain number.
        label_smoothing: share of the target spread evenly over all classes, from 0 to 1.

    Raises:
        LossError: the shapes do not belong together, or the target is no integer tensor.
    """
    logits = _logits(output)
    _check(logits, target, "cross_entropy")
    total = F.cross_entropy(
        _at_least_fp32(logits).reshape(-1, logits.shape[-1]),
        target.reshape(-1).long(),
        ignore_index=IGNORED if ignore_index is None else ignore_index,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    return Loss(total, _count(target, ignore_index))


def next_token_loss(output: Any, tokens: Tensor, mask: Tensor | None = None) -> Loss:
    """Cross entropy of each token given those before it: position t of the logits against token t + 1.

    Args:
        output: logits of shape (B, T, C), or an object with such ``.logits``.
        tokens: the model's own input, (B, T), integer; not shifted.
        mask: (B, T), true or 1 where a token is real; a prediction counts where the token to predict is real.

    Raises:
        LossError: the shapes do not belong together.
    """
    logits = _logits(output)
    _check(logits, tokens, "next_token_loss")
    if tokens.ndim < 2:
        raise LossError(f"next_token_loss: tokens have shape {tuple(tokens.shape)}; allowed: (B, T)")
    following = tokens[..., 1:]
    if mask is None:
        return cross_entropy(logits[..., :-1, :], following, ignore_index=None)
    if mask.shape != tokens.shape:
        raise LossError(
            f"next_token_loss: mask has shape {tuple(mask.shape)}; allowed: that of the tokens, {tuple(tokens.shape)}\n"
            "    try: px.next_token_loss(output, batch['input_ids'], batch['attention_mask'])"
        )
    return cross_entropy(logits[..., :-1, :], following.masked_fill(mask[..., 1:] == 0, IGNORED))


def mse(output: Tensor, target: Tensor) -> Loss:
    """Squared error summed over all elements; the count is the number of elements.

    Raises:
        LossError: output and target differ in shape; (B, 1) against (B,) would silently compare all with all.
    """
    if output.shape != target.shape:
        raise LossError(
            f"mse: output has shape {tuple(output.shape)}, target {tuple(target.shape)}; allowed: equal shapes\n"
            "    try: px.mse(output.squeeze(-1), target)"
        )
    difference = _at_least_fp32(output) - _at_least_fp32(target)
    return Loss(difference.square().sum(), target.numel())


def accuracy(output: Any, target: Tensor, ignore_index: int | None = IGNORED) -> Loss:
    """How many of the targets that count have the highest logit. Shapes as in ``cross_entropy``."""
    logits = _logits(output)
    _check(logits, target, "accuracy")
    right = logits.argmax(dim=-1) == target
    if ignore_index is not None:
        right = right & (target != ignore_index)
    return Loss(right.sum(), _count(target, ignore_index))


def _logits(output: Any) -> Tensor:
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise LossError(
            f"the model's output is a {type(output).__name__}; allowed: a tensor of logits, or an object with .logits\n"
            "    try: loss=lambda output, batch: px.cross_entropy(output['scores'], batch['label'])"
        )
    return logits


def _check(logits: Tensor, target: Tensor, name: str) -> None:
    if logits.shape[:-1] != target.shape:
        channels_first = logits.ndim > 2 and (logits.shape[0], *logits.shape[2:]) == tuple(target.shape)
        fix = (
            "output.movedim(1, -1)" if channels_first else "output[:, -1]  # or whichever positions the targets are of"
        )
        raise LossError(
            f"{name}: logits have shape {tuple(logits.shape)}, target {tuple(target.shape)}; allowed: logits of the "
            f"target's shape and one last axis more, the classes\n    try: px.{name}({fix}, target)"
        )
    if target.is_floating_point() or target.is_complex():
        raise LossError(
            f"{name}: target is {target.dtype}; allowed: whole class numbers\n    try: px.{name}(output, target.long())"
        )


def _count(target: Tensor, ignore_index: int | None) -> int | Tensor:
    # A count on the device stays there: reading it here would wait for the device at every micro-batch.
    return target.numel() if ignore_index is None else (target != ignore_index).sum()


def _at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
