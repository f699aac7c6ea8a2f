"""Half precision: autocast for the computation, and a loss scale that keeps fp16 gradients in range."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from phalanx.config import Plan
from phalanx.parallel.activation_checkpointing import recomputes
from phalanx.parallel.mixed_precision import HALVES, gathered_type

UNCHANGED = nullcontext()


def compute_context(plan: Plan, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of forward and loss: autocast to the plan's precision; no context for fp32."""
    if plan.precision == "fp32":
        return UNCHANGED
    return torch.autocast(device.type, dtype=HALVES[plan.precision])


def cast_weights_once(plan: Plan, *, micro_batches: int) -> AbstractContextManager[object]:
    """Make autocast cast each weight once a step, not once a micro-batch.

    autocast drops its casts at the end of the outermost context, normally that of one forward. With recomputation they
    are not kept: backward would hold two bytes a parameter more than the forecast says.
    """
    if micro_batches == 1 or plan.precision not in HALVES or gathered_type(plan) or recomputes(plan):
        return UNCHANGED
    return _one_autocast()


@contextmanager
def _one_autocast() -> Iterator[None]:
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


_LEAST = 2.0**-24


@dataclass(kw_only=True, slots=True)
class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018, section 3.2).

    The summed loss is multiplied by ``scale`` before backward, gradients are divided by it after. If the gradient norm
    is not finite the update is skipped and the scale halved. After ``patience`` good steps it is doubled. The norm is
    the same on every rank, sharded or not, so that all ranks decide alike.
    """

    scale: float
    good: int = 0
    patience: int = 2000

    @classmethod
    def for_batch(cls, batch: int) -> LossScale:
        """Return the first scale: about 2**12 on the mean over a batch, for any cut of the batch."""
        return cls(scale=2.0 ** (12 - round(math.log2(batch))))

    @property
    def exhausted(self) -> bool:
        """Return True if it cannot go lower, so that non-finite numbers have another cause."""
        return self.scale <= _LEAST

    def update(self, finite: bool) -> None:
        """Adapt the scale after a step."""
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.scale = max(_LEAST, self.scale / 2)
        elif self.good == self.patience:
            self.scale, self.good = self.scale * 2, 0
