"""Biases that rounding alone moves, and the running means of BatchNorm that follow them.

BatchNorm takes the mean of its batch away, and with it whatever a bias before it adds: the gradient of that bias is
zero but for rounding. An optimizer that divides a gradient by its own size makes whole steps of it, other ones in each
run. Nothing that training computes depends on it, but the running mean follows the bias, and an evaluation sees both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from phalanx.parallel.buffer_sync import statistics_of
from phalanx.verify.record import RunRecord

Fed = Mapping[str, Sequence[Any]]
"""Running mean → the bias of the layer before it, and the momentum with which it is updated (``None``: a mean)."""


def fed_by(module: nn.Module) -> dict[str, list[Any]]:
    """As ``Fed``: of each BatchNorm that comes, among modules with parameters, right after one with a bias."""
    found: dict[str, list[Any]] = {}
    before: tuple[str, nn.Module] | None = None
    for name, one in module.named_modules():
        keys = statistics_of(one)
        mean = getattr(one, keys[0], None) if keys else None
        if mean is not None and before is not None:
            of_torch = isinstance(one, _NormBase)
            own = "bias" if of_torch else "bias_"  # of Keras, whose momentum is the share of what was
            bias = before[1]._parameters.get(own)
            if isinstance(bias, nn.Parameter) and bias.shape == mean.shape:
                momentum: Any = one.momentum
                moves = momentum if of_torch or momentum is None else 1 - momentum
                found[f"{name}.{keys[0]}".lstrip(".")] = [f"{before[0]}.{own}".lstrip("."), moves]
        if next(one.parameters(recurse=False), None) is not None:
            before = name, one
    return found


def wandering_means(one: RunRecord, silent: Sequence[str], fed: Fed) -> dict[str, float]:
    """Running mean → by how much each of its elements may differ after the last step between two runs of a job.

    In the batch of step j the bias has moved by no more than the steps before it, and counts in the running mean with
    the weight that this batch has there by then; in each of two runs.

    Args:
        silent: names of parameters whose first gradient is zero but for rounding.
    """
    far: dict[str, float] = {}
    for mean, (bias, momentum) in fed.items():
        if bias not in silent:
            continue
        moved = [0.0, *accumulate(_steps(one, bias))][:-1]  # before each batch
        last = len(moved) - 1
        weights = [
            1 / len(moved) if momentum is None else momentum * (1 - momentum) ** (last - at) for at in range(last + 1)
        ]
        if total := sum(weight * way for weight, way in zip(weights, moved, strict=True)):
            far[mean] = 2 * total
    return far


def in_words(means: Iterable[str]) -> str:
    """What a proof says of running means that differ by no more than that."""
    return (
        f"{', '.join(means)}: other than one device's by no more than rounding moves the bias of the layer before, of "
        "which BatchNorm leaves no gradient; evaluations follow it, and are not compared. With bias=False in that "
        "layer all is compared."
    )


def _steps(one: RunRecord, bias: str) -> list[float]:
    """The most that each step moves an element of it by; zeros where that is not known of the optimizer.

    Adam's step is lr times a weighted mean of gradients over the root of a weighted mean of their squares, with weights
    a and b that add up to one: no more than lr · sqrt(sum of a² / b) by Cauchy and Schwarz, which is close to lr in the
    first steps and lr · (1 - beta1) / sqrt(1 - beta2) at most where beta1² < beta2. RMSprop's is lr / sqrt(1 - alpha).
    """
    options: Mapping[str, Any] = one.options.get(bias, {})
    rates = [step.rates.get(bias, 0.0) for step in one.steps]
    if "betas" in options or "beta_2" in options:
        first, second = options["betas"][:2] if "betas" in options else (options["beta_1"], options["beta_2"])
        return [rate * _adam_factor(taken, first, second) for taken, rate in enumerate(rates, 1)]
    if "alpha" in options:
        return [rate / math.sqrt(1 - options["alpha"]) for rate in rates]
    if "rho" in options and not options.get("centered"):
        return [rate / math.sqrt(1 - options["rho"]) for rate in rates]
    return [0.0] * len(rates)


def _adam_factor(taken: int, first: float, second: float) -> float:
    if not 0 < second < 1:
        return 0.0  # not known
    square = sum((first**2 / second) ** age for age in range(taken))
    over = ((1 - first) / (1 - first**taken)) ** 2 * (1 - second**taken) / (1 - second)
    return math.sqrt(square * over)
