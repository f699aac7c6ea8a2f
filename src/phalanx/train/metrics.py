"""The results of one step, and the copy of its numbers from the device without delaying it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from phalanx.device_kinds import kind_of

Totals = torch.Tensor | tuple[float, float]
"""Sum and count of a loss: numbers on a CPU, where a tensor would cost more than adding; of shape (2,) elsewhere."""
Numbers = torch.Tensor | tuple[float, ...]
"""Sum and count of a loss, followed by those of each that the job has by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """The results of one step; ``lr`` is that of the first parameter group.

    ``skipped``: no update was made, because of an overflow under loss scaling or of ``accident``. ``phases``: results
    of each phase by name, if the job has phases; the other fields are then the first phase's. ``names``: of the losses
    of ``px.Losses``, if the job has them.
    """

    step: int
    epoch: int
    samples: int
    lr: float
    skipped: bool
    _totals: Numbers
    _norm: torch.Tensor | None
    _ready: torch.Event | None = None
    accident: str = ""
    phases: Mapping[str, Metrics] = field(default_factory=dict[str, "Metrics"])
    names: tuple[str, ...] = ()

    @property
    def losses(self) -> dict[str, float]:
        """Return losses by name: of each phase of the step, and of ``px.Losses`` without weights.

        In a phase they are ``phase/name``. Waits as ``totals`` does.
        """
        found = {name: total / count if count else math.nan for name, (total, count) in self.sums.items()}
        for phase, each in self.phases.items():
            found = {**found, phase: each.loss, **{f"{phase}/{name}": loss for name, loss in each.losses.items()}}
        return found

    @property
    def sums(self) -> dict[str, tuple[float, float]]:
        """Return sum and count over the global batch of each loss of ``px.Losses``. Waits as ``totals`` does."""
        if not self.names:
            return {}
        sums = iter(self._numbers()[2:])
        return dict(zip(self.names, zip(sums, sums, strict=True), strict=True))

    @property
    def totals(self) -> tuple[float, float]:
        """Return sum and count of the loss. With streams it waits for this step's backward, not for later work."""
        numbers = self._numbers()
        return numbers[0], numbers[1]

    @property
    def count(self) -> float:
        """Return the divisor of the loss: tokens or samples of the global batch. Waits as ``totals`` does."""
        return self.totals[1]

    @property
    def loss(self) -> float:
        """Return the loss of the global batch: its sum over its count. Waits as ``totals`` does."""
        total, count = self.totals
        return total / count if count else math.nan

    @property
    def grad_norm(self) -> float | None:
        """Return the global L2 norm before clipping; ``None`` if it was not needed. Waits as ``totals`` does."""
        self._wait()
        return None if self._norm is None else float(self._norm)

    def _numbers(self) -> Sequence[float]:
        if isinstance(self._totals, tuple):
            return self._totals
        self._wait()
        return self._totals.tolist()

    def _wait(self) -> None:
        if self._ready is not None and not self._ready.query():
            self._ready.synchronize()


def towards_host(totals: Numbers, norm: torch.Tensor | None) -> tuple[Numbers, torch.Tensor | None, torch.Event | None]:
    """Start to copy ``totals`` (sums, counts) and ``norm`` to the host, with an event for when they are ready.

    Reading an accelerator's tensor waits for all queued work, the next step included. With streams, a copy into pinned
    memory, queued here and followed by an event, is ready as soon as this step is. On a CPU it is ready at once.
    """
    if isinstance(totals, tuple) or not (kind := kind_of(totals.device)).streams:
        return totals, norm, None
    both = norm is not None and norm.device == totals.device
    numbers = torch.cat((totals, norm.detach().to(totals.dtype).reshape(1))) if both and norm is not None else totals
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=kind.pinned)
    host.copy_(numbers, non_blocking=True)
    ready = kind.event()
    ready.record(kind.current_stream(totals.device))
    return host[: len(totals)], host[-1] if both else norm, ready
