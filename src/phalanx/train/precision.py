"""Half precision: autocast for the computation, and a loss scale that keeps fp16 gradients in range."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from phalanx.spec import Plan

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def compute_context(plan: Plan, device: torch.device) -> AbstractContextManager[object]:
    """Where forward and loss run: autocast to the plan's precision; nothing for fp32."""
    if plan.precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=_DTYPES[plan.precision])


@dataclass(kw_only=True, slots=True)
class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018, section 3.2).

    The loss is multiplied by ``scale`` before backward, gradients are divided by it after. Where the global gradient
    norm is not finite the update is skipped and the scale halved; after ``patience`` good steps it is doubled. The
    norm is the same on every rank, sharded or not, so that all ranks decide alike.
    """

    scale: float = 2.0**16
    good: int = 0
    patience: int = 2000

    def update(self, finite: bool) -> None:
        """Learn from one step."""
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.scale = max(1.0, self.scale / 2)
        elif self.good == self.patience:
            self.scale, self.good = self.scale * 2, 0
