"""The forms a loss function may give its result in: a sum and a count, or a plain mean over the samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from phalanx.config.job import Loss
from phalanx.errors import LossError


@dataclass(frozen=True, slots=True)
class Reading:
    """What a loss function gave for one micro-batch: ``value * weight`` is a sum over ``count``.

    Attributes:
        value: scalar tensor that backward runs on.
        weight: 1 for a sum, the samples for a mean, 0 for a filler.
        count: a number or a scalar tensor; 0 for a filler.
        samples: in the micro-batch.
        mean: whether ``value`` is a mean over the samples.
    """

    value: torch.Tensor
    weight: float
    count: Any
    samples: int
    mean: bool


def read_loss(result: Any, samples: int, where: int | str) -> Reading:
    """Read what a loss function gave for ``samples`` samples (0: a filler); ``where`` is the step, or what else it was.

    Raises:
        LossError: if it is of neither form.
    """
    if isinstance(result, Loss) or (isinstance(result, tuple) and len(result) == 2):
        total, count = result
        if not isinstance(total, torch.Tensor) or total.dim() != 0:
            raise LossError(_wrong_form(f"a sum that is {_describe(total)}", where))
        if count.dim() != 0 if isinstance(count, torch.Tensor) else not isinstance(count, Real):
            raise LossError(_wrong_form(f"a count that is {_describe(count)}", where))
        if not samples:
            return Reading(total, 0.0, 0, 0, False)
        return Reading(total, 1.0, count, samples, False)
    if not isinstance(result, torch.Tensor) or result.dim() != 0:
        raise LossError(_wrong_form(_describe(result), where))
    return Reading(result, float(samples), samples, samples, True)


def check_totals(step: int, total: float, count: float, *, overflows: bool = False) -> None:
    """Raise where the loss of a whole step is no number, or nothing was counted; ``overflows``: it may be no number.

    Raises:
        LossError: with the usual causes.
    """
    if not (math.isfinite(count) and count > 0):
        raise LossError(_bad_count(step, count))
    if not (overflows or math.isfinite(total)):
        raise LossError(
            f"the loss of step {step} is {total}.\n"
            "    Usual causes: a learning rate too high or without warm-up, a logarithm or a division by zero "
            "in the loss, bad values in the data.\n"
            "    try: job(clip=1.0, schedule=px.Schedule(warmup_steps=100)), or a lower lr"
        )


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
    return (
        f"the loss function gave {given} in {f'step {where}' if isinstance(where, int) else where}; "
        "it may give px.Loss(sum, count), both scalars, "
        "or a scalar tensor that is the mean over the samples of the batch.\n"
        '    try: loss=lambda output, batch: px.cross_entropy(output, batch["label"])'
    )


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
