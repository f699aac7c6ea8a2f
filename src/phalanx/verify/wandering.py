"""Biases that rounding alone moves, and the running means of BatchNorm that follow them.

BatchNorm takes the mean of its batch away, and with it whatever a bias before it adds: the gradient of that bias is
zero but for rounding. An optimizer that divides a gradient by its own size makes whole steps of it, other ones in each
run. Nothing that training computes depends on it, but the running mean follows the bias, and an evaluation sees both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.verify.record import END, START, RunRecord

MEAN = "running_mean"


def wandering_means(one: RunRecord, silent: Sequence[str]) -> dict[str, float]:
    """Running mean → by how much each of its elements may differ between two runs of ``one``'s job.

    A running mean is a mean of those of the batches, in each of which the bias counts by no more than it was moved. One
    run moves it by no more than the sum of its steps. Adam's are at most lr · max(1, (1 - beta1) / sqrt(1 - beta2))
    (Kingma and Ba 2015, section 2.1), RMSprop's lr / sqrt(1 - alpha). Of other optimizers nothing is known.

    Args:
        silent: names of parameters whose first gradient is zero but for rounding.
    """
    far: dict[str, float] = {}
    for name, mean in one.buffers.get(END, {}).items() if one.buffers else ():
        alike = [bias for bias in silent if one.values[START][bias].shape == mean.shape]
        ways = [_longest_way(one, bias) for bias in alike] if name.endswith(MEAN) else []
        if ways and max(ways) > 0:
            far[name] = 2 * max(ways)
    return far


def in_words(far: Mapping[str, float]) -> str:
    """What a proof says of it."""
    return (
        f"{', '.join(far)}: compared up to what rounding moves the bias of the layer before, of which BatchNorm leaves "
        "no gradient; evaluations follow it, and are not compared. With bias=False in that layer all is compared."
    )


def _longest_way(one: RunRecord, bias: str) -> float:
    """The most that all steps move each element of it by; 0 where that is not known."""
    options: Mapping[str, Any] = one.options.get(bias, {})
    if "betas" in options:
        first, second = options["betas"][:2]
        factor = max(1.0, (1 - first) / math.sqrt(1 - second))
    elif "alpha" in options:
        factor = 1 / math.sqrt(1 - options["alpha"])
    else:
        return 0.0
    return factor * sum(step.rates.get(bias, 0.0) for step in one.steps)
