"""Rounding measured on the job itself: the movement of its results when each weight changes in its last place.

Two orders of the same sums differ by rounding. The effect on a result depends on the model: on terms that cancel, on
the number of steps, on an optimizer that makes a whole step of a gradient that is zero except for rounding. No formula
covers all of it. So the plain loop runs again on the same batches with each weight times 1 ± one unit in its last
place, drawn at random (compare Monte Carlo arithmetic, Parker 1997). The largest movement of ``DRAWS`` runs is the
noise of a result; a plan may differ by ``TIMES`` that, plus a floor. Sound plans stay below 2 times the noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

DRAWS = 2
TIMES = 6
LAST_PLACE = {"fp32": 2.0**-23, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""By precision, of those whose steps can be compared."""
FLOOR = {"fp32": 1e-5, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""Share of a tensor's norm that may differ where changed weights move nothing."""
SUM_FLOOR = {"fp32": 1e-5, "bf16": 2.0**-10, "fp16": 2.0**-13}
"""The same of a loss, and of the factor common to all gradients: sums over a batch, whose errors cancel."""
CAP = {"fp32": 1e-3, "bf16": 0.25, "fp16": 0.25}
"""Share of the first loss, and of the norm of all first gradients, that ``TIMES`` the noise may not exceed.

Beyond it the job does not repeat itself, such as one that draws without a seed, and noise must not hide that.
"""


LOSS_TERMS = 1.0
"""Size that the terms of a loss are taken to have at least: those of one near 0 may cancel, and round as they are."""

SUMS = 9
"""Numbers that a sum over the batch counts as in ``spread``: it is the sum of many errors."""


def spread(count: int) -> float:
    """Return the factor on the noise of ``count`` numbers: few may lie close by chance."""
    return 1 + 3 / math.sqrt(max(1, count))


@final
@dataclass(frozen=True, slots=True)
class Variation:
    """A variation of the plain loop's run.

    Attributes:
        lr_scale: factor on all learning rates.
        share: weights are multiplied by 1 ± this; 0 changes none.
        seed: of the signs.
        first_step: take one step, and do not evaluate.
        times: backward runs on the loss times this, by which gradients are divided again; not in fp16.
        batches: epoch, and (sample numbers, batch) of the micro-batches, of each step; None reads them, and keeps them.
        evaluation: evaluation data, if ``batches`` are given.
        cut: (model, samples in a batch) → ranges [start, stop) of its micro-batches; empty: it is taken whole.
    """

    lr_scale: float = 1.0
    share: float = 0.0
    seed: int = 0
    first_step: bool = False
    times: int = 1
    batches: Sequence[tuple[int, list[tuple[list[int], Any]]]] | None = None
    evaluation: Any = None
    cut: Callable[[torch.nn.Module, int], Sequence[tuple[int, int]]] | None = None

    @torch.no_grad()
    def prepare(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Change weights and learning rates."""
        for group in (group for one in optimizers for group in one.param_groups):
            group["lr"] *= self.lr_scale
        generator = torch.Generator().manual_seed(self.seed)
        for tensor in model.parameters() if self.share else ():
            if tensor.is_floating_point() or tensor.is_complex():
                signs = torch.randint(2, tensor.shape, generator=generator).mul_(2).sub_(1)
                tensor.mul_((1.0 + max(self.share, torch.finfo(tensor.dtype).eps) * signs).to(tensor))
