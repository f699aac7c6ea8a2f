"""Losses and metrics as a sum and a count, so that any split of a batch adds up to the same number.

Shapes: B samples, T positions, C classes or vocabulary. The class is the *last* axis of logits, as in language models.
Sums are at least fp32, for any precision of the model; no function here returns a mean. A job's own loss function may
return a plain mean over the samples, too: ``read_loss`` reads either form.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.config.losses import IGNORED, Loss, NamedLosses
from phalanx.device_kinds import widened
from phalanx.errors import LossError


def cross_entropy(
    output: Any, target: Tensor, *, ignore_index: int | None = IGNORED, label_smoothing: float = 0.0
) -> Loss:
    """Return cross entropy summed over the counted targets.

    Args:
        output: logits of shape (B, C), (B, T, C) or any (..., C), or an object with such ``.logits``.
        target: classes of shape (B,), (B, T) or any (...), integer; or probabilities of the logits' shape, floating.
        ignore_index: the target value that does not count, and with it rows of probabilities that are all 0.
            ``None``: all count, and the count is a plain number.
        label_smoothing: share of the target spread evenly over all classes, from 0 to 1.

    Raises:
        LossError: the shapes do not belong together, or the target is no integer tensor.
    """
    logits = _logits(output)
    if target.shape != logits.shape or not target.is_floating_point():
        _check(logits, target, "cross_entropy")
    elif ignore_index not in (None, IGNORED):
        fix = "rows of probabilities that are all 0 do not count"
        raise LossError(
            f"cross_entropy: ignore_index={ignore_index} with probabilities; allowed: classes\n    try: {fix}"
        )
    elif target.is_cpu and not _are_probabilities(target):
        allowed = "rows (the last dimension) that sum to 1, or to 0 where they do not count"
        raise LossError(f"cross_entropy: targets of floating type that are no probabilities; allowed: {allowed}")
    summed = _compiled() if _compiles.get() else _summed
    try:
        total = summed(logits, target, IGNORED if ignore_index is None else ignore_index, label_smoothing)
    except IndexError as error:
        classes, found = logits.shape[-1], f"targets from {int(target.min())} to {int(target.max())}"
        allowed = f"0 to {classes - 1}, and the ignore_index\n    try: a last layer with as many outputs as classes"
        raise LossError(f"cross_entropy: {found} for logits of {classes} classes; allowed: {allowed}") from error
    return Loss(total, _count(target, ignore_index))


@contextmanager
def compiled_losses() -> Iterator[None]:
    """Run ``cross_entropy`` and ``next_token_loss`` as one compiled kernel inside the block.

    Without it, logits in half precision are written out twice in fp32: for the softmax, and for its gradient.
    """
    before = _compiles.set(True)
    try:
        yield
    finally:
        _compiles.reset(before)


def _are_probabilities(target: Tensor) -> bool:
    sums, close = target.detach().double().sum(-1), max(1e-3, target.shape[-1] * torch.finfo(target.dtype).eps)
    return bool(((sums - 1).abs() <= close).logical_or(sums == 0).all()) and bool((target >= 0).all())


_compiles: ContextVar[bool] = ContextVar("compiles", default=False)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(_summed)


def _summed(logits: Tensor, target: Tensor, ignored: int, label_smoothing: float) -> Tensor:
    rows, classes = _at_least_fp32(logits).reshape(-1, logits.shape[-1]), target.reshape(-1)
    if target.is_floating_point():
        wanted = classes.reshape(rows.shape).to(rows.dtype)
        each = F.cross_entropy(rows, wanted, reduction="none", label_smoothing=label_smoothing)
        return torch.where(wanted.any(-1), each, 0.0).sum()
    classes = classes.long()
    return F.cross_entropy(rows, classes, ignore_index=ignored, reduction="sum", label_smoothing=label_smoothing)


def next_token_loss(output: Any, tokens: Tensor, mask: Tensor | None = None) -> Loss:
    """Return the cross entropy of each token given those before it: logits at t against token t + 1.

    Args:
        output: logits of shape (B, T, C), or an object with such ``.logits``.
        tokens: the model's own input, (B, T), integer; not shifted.
        mask: (B, T), true or 1 for a real token; a prediction counts if the token to predict is real.

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
    """Return the squared error summed over all elements; the count is the number of elements.

    Raises:
        LossError: output and target differ in shape; (B, 1) against (B,) would silently compare all with all.
    """
    if output.shape != target.shape:
        raise LossError(
            f"mse: output has shape {tuple(output.shape)}, target {tuple(target.shape)}; allowed: equal shapes\n"
            "    try: px.mse(output.squeeze(-1), target)"
        )
    return Loss((_at_least_fp32(output) - _at_least_fp32(target)).square().sum(), target.numel())


def load_balancing_loss(logits: Tensor, k: int, mask: Tensor | None = None) -> Loss:
    """Return a loss against routers that send all tokens to few of E experts; 1 if all are used alike.

    Per sequence it is E times the sum over experts of their share of the tokens times their mean probability (DeepSeek-
    AI 2024, section 2.1.2). Sequences are summed with the weight of their tokens, so it adds up to the same number
    under any split of a batch. Taken over a batch as a whole (Fedus et al. 2022, section 2.2) it is a product of two
    means, and the mean over micro-batches differs from that of the global batch.

    Add ``coefficient * load_balancing_loss(...).sum`` to the sum of a loss that counts tokens.

    Args:
        logits: of the router, (B, T, E); one layer's.
        k: experts chosen for each token, those with the largest logits.
        mask: (B, T), true or 1 for a real token.

    Raises:
        LossError: the logits have no axis of sequences, or the mask is of another shape.
    """
    if logits.ndim < 3 or not 1 <= k <= logits.shape[-1]:
        raise LossError(
            f"load_balancing_loss: logits have shape {tuple(logits.shape)}, k={k}; allowed: (B, T, E) and 1 to E\n"
            "    try: px.load_balancing_loss(logits.view(*batch['input_ids'].shape, -1), 2)"
        )
    probability = torch.softmax(_at_least_fp32(logits), dim=-1)
    chosen = torch.zeros_like(probability).scatter(-1, probability.topk(k, dim=-1).indices, 1.0)
    if mask is None:
        chosen_share, count = chosen.mean(-2) / k, logits.shape[:-1].numel()
    else:
        real = _real(mask, logits, "load_balancing_loss")
        chosen_share = (chosen * real).sum(-2) / (k * real.sum(-2).clamp(min=1))
        probability, count = probability * real, real.sum()
    return Loss((chosen_share * probability.sum(-2)).sum() * logits.shape[-1], count)


def router_z_loss(logits: Tensor, mask: Tensor | None = None) -> Loss:
    """Return a loss that keeps a router's logits small: squared log-sum-exp, summed over tokens (Zoph et al. 2022).

    Args:
        logits: of the router, (B, T, E) or any (..., E); one layer's.
        mask: (B, T), true or 1 for a real token.

    Raises:
        LossError: the mask is of another shape.
    """
    each = torch.logsumexp(_at_least_fp32(logits), dim=-1).square()
    if mask is None:
        return Loss(each.sum(), logits.shape[:-1].numel())
    real = _real(mask, logits, "router_z_loss").squeeze(-1)
    return Loss((each * real).sum(), real.sum())


def accuracy(output: Any, target: Tensor, ignore_index: int | None = IGNORED) -> Loss:
    """Return the number of counted targets with the highest logit. Shapes as in ``cross_entropy``."""
    logits = _logits(output)
    _check(logits, target, "accuracy")
    right = logits.argmax(dim=-1) == target
    if ignore_index is not None:
        right = right & (target != ignore_index)
    return Loss(right.sum(), _count(target, ignore_index))


def _real(mask: Tensor, logits: Tensor, name: str) -> Tensor:
    if mask.shape != logits.shape[:-1]:
        raise LossError(
            f"{name}: mask has shape {tuple(mask.shape)}, logits {tuple(logits.shape)}; allowed: a mask of the logits' "
            f"shape without the last axis\n    try: px.{name}(..., mask=batch['attention_mask'])"
        )
    return (mask != 0).unsqueeze(-1).to(torch.float32)


def _logits(output: Any) -> Tensor:
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        part = "output[0]" if isinstance(output, tuple | list) else "output['scores']"
        if isinstance(output, Mapping):
            part = f"output[{next((name for name, one in output.items() if isinstance(one, Tensor)), 'scores')!r}]"
        raise LossError(
            f"the model's output is a {type(output).__name__}; allowed: a tensor of logits, or an object with .logits\n"
            f"    try: loss=lambda output, batch: px.cross_entropy({part}, batch['label'])"
        )
    return logits


def _check(logits: Tensor, target: Tensor, name: str) -> None:
    if logits.shape[:-1] != target.shape:
        channels_first = logits.ndim > 2 and (logits.shape[0], *logits.shape[2:]) == tuple(target.shape)
        fix = "output[:, -1]  # or whichever positions the targets are of"
        fix = "output.movedim(1, -1)" if channels_first else fix
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
    counts = target.any(-1) if target.is_floating_point() else target.ne(ignore_index or 0)
    return counts.numel() if ignore_index is None else counts.sum()


def _at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@dataclass(frozen=True, slots=True)
class LossReading:
    """A loss function's result for one micro-batch: ``value * weight`` is a sum over ``count``.

    Attributes:
        value: scalar tensor for backward.
        weight: 1 for a sum, the samples for a mean, 0 for a filler.
        count: a number or a scalar tensor; 0 for a filler.
        mean: whether ``value`` is a mean over the samples.
        named: sum and count of each loss by name, without gradient.
    """

    value: torch.Tensor
    weight: float
    count: Any
    samples: int
    mean: bool
    named: tuple[tuple[Tensor, Any], ...] = ()


Shares = Sequence[Any]
"""Of each named loss, what its sum is multiplied by: the first one's count over its own, of the whole global batch."""


def read_loss(result: Any, samples: int, where: int | str, shares: Shares | None = None) -> LossReading:
    """Read a loss function's result for ``samples`` samples (0: a filler); ``where`` is the step, for messages.

    Losses by name become their weighted total, each multiplied by its entry of ``shares``, by default 1.

    Raises:
        LossError: if it is of neither form.
    """
    if isinstance(result, NamedLosses):
        return _read_named(result, samples, where, shares)
    if isinstance(result, Loss) or (isinstance(result, tuple) and len(result) == 2):
        total, count = result
        if not isinstance(total, torch.Tensor) or total.dim() != 0:
            raise LossError(_wrong_form(f"a sum that is {_describe(total)}", where))
        if count.dim() != 0 if isinstance(count, torch.Tensor) else not isinstance(count, Real):
            raise LossError(_wrong_form(f"a count that is {_describe(count)}", where))
        return LossReading(total, 1.0, count, samples, False) if samples else LossReading(total, 0.0, 0, 0, False)
    if not isinstance(result, torch.Tensor) or result.dim() != 0:
        raise LossError(_wrong_form(_describe(result), where))
    return LossReading(result, float(samples), samples, samples, True)


def _read_named(result: NamedLosses, samples: int, where: int | str, shares: Shares | None) -> LossReading:
    at = f"step {where}" if isinstance(where, int) else where
    reads = [read_loss(one, samples, f"{at}, as {name!r}") for name, one in result.losses.items()]
    weights, first = result.weights.values(), reads[0]
    named = tuple((widened(read.value.detach()) * read.weight, read.count) for read in reads)
    if all(read.mean for read in reads):
        return replace(
            first, value=_added(weight * read.value for weight, read in zip(weights, reads, strict=True)), named=named
        )
    each = zip(weights, reads, shares or (1.0,) * len(reads), strict=True)
    value = _added(read.value * (weight * read.weight) * _like(share, read.value) for weight, read, share in each)
    return LossReading(value, 1.0 if samples else 0.0, first.count, samples, False, named)


def _like(share: Any, value: Tensor) -> Any:
    return share.to(value) if isinstance(share, Tensor) else share


def _added(terms: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms)


def check_count(step: int, count: float) -> None:
    """Raise if the count of a whole step's loss is 0.

    Raises:
        LossError: with the usual causes.
    """
    if not (math.isfinite(count) and count > 0):
        raise LossError(_bad_count(step, count))


def _bad_count(step: int, count: float) -> str:
    if count == 0:
        return (
            f"nothing was counted in step {step}: the counts of its loss add up to 0 over the global batch.\n"
            "    Usual causes: every label is the ignored index, every weight or mask is 0.\n"
            "    try: leave such samples out of job.data, or a larger batch"
        )
    return (
        f"the count of the loss of step {step} is {count}; it is what the sum is divided by: a number above 0.\n"
        "    try: px.Loss(sum, count) with count the tokens or samples that were summed"
    )


def _wrong_form(given: str, where: int | str) -> str:
    cause = "    Usual cause: .item() or float(), after which no gradient is left.\n" if "float" in given else ""
    return (
        f"the loss function gave {given} in {f'step {where}' if isinstance(where, int) else where}; it may give "
        "px.Loss(sum, count), both scalars, or a scalar tensor that is the mean over the samples of the batch.\n"
        f'{cause}    try: loss=lambda output, batch: px.cross_entropy(output, batch["label"])'
    )


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
