"""What one step gives back, and how its numbers leave the device without holding it up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

Totals = torch.Tensor | tuple[float, float]
"""Sum and count of a loss: numbers on a CPU, where a tensor would cost more than adding; fp64, shape (2,) on CUDA."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """What one step gives back; ``lr`` is that of the first parameter group.

    ``skipped``: no update was made, since loss scaling met an overflow or for what ``accident`` says. ``phases``: what
    each phase of the step gave, by name, where the job has phases; all else is then the first one's.
    """

    step: int
    epoch: int
    samples: int
    lr: float
    skipped: bool
    _totals: Totals
    _norm: torch.Tensor | None
    _ready: torch.cuda.Event | None = None
    accident: str = ""
    phases: Mapping[str, Metrics] = field(default_factory=dict[str, "Metrics"])

    @property
    def losses(self) -> dict[str, float]:
        """Loss of each phase that was part of the step, by name. Waits as ``totals`` does."""
        return {name: each.loss for name, each in self.phases.items()}

    @property
    def totals(self) -> tuple[float, float]:
        """Sum and count of the loss. On CUDA it waits for this step's backward, not for what was queued after it."""
        if isinstance(self._totals, tuple):
            return self._totals
        self._wait()
        total, count = self._totals.tolist()
        return total, count

    @property
    def count(self) -> float:
        """What the loss was divided by: tokens or samples of the global batch. Waits as ``totals`` does."""
        return self.totals[1]

    @property
    def loss(self) -> float:
        """Loss of the global batch: its sum over its count. Waits as ``totals`` does."""
        total, count = self.totals
        return total / count if count else math.nan

    @property
    def grad_norm(self) -> float | None:
        """Global L2 norm before clipping; ``None`` where nothing needed it. Waits as ``totals`` does."""
        self._wait()
        return None if self._norm is None else float(self._norm)

    def _wait(self) -> None:
        if self._ready is not None:
            self._ready.synchronize()


def towards_host(
    totals: Totals, norm: torch.Tensor | None
) -> tuple[Totals, torch.Tensor | None, torch.cuda.Event | None]:
    """Start to copy ``totals`` (sum, count) and ``norm`` to the host, and when they may be read; at once on a CPU.

    Reading a CUDA tensor waits for all that is queued, the next step included. A copy into pinned memory, queued here
    and followed by an event, is there as soon as this step has come to it.
    """
    if isinstance(totals, tuple):
        return totals, norm, None
    both = norm is not None and norm.device == totals.device
    numbers = torch.cat((totals, norm.detach().to(totals.dtype).reshape(1))) if both and norm is not None else totals
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream(totals.device))
    return host[:2], host[2] if both else norm, ready
