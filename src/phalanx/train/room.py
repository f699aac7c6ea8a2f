"""How many samples a rank has memory for, by what those it has had took."""

from __future__ import annotations

import math
from typing import final

import torch

from phalanx.hardware import memory_bytes, peak_memory

_USABLE = 0.9  # of what is free: allocators do not come out even


@final
class Room:
    """Follows one rank's memory. Of micro-batches of a stated size there is nothing to follow."""

    def __init__(self, *, cuda: bool, workers_here: int, bounded: bool) -> None:
        """``bounded``: micro-batches are no larger however many samples a rank takes."""
        self._cuda, self._workers, self._bounded = cuda, workers_here, bounded
        self._seen = 0
        self._saved = 0.0

    def took(self, samples: int) -> None:
        """The rank has taken a step with so many samples."""
        self._seen = max(self._seen, samples)

    def saved(self, nbytes: int, samples: int) -> None:
        """Autograd has saved so many bytes for a forward of so many samples."""
        if samples:
            self._saved = max(self._saved, nbytes / samples)

    def most(self) -> float:
        """Samples that there is memory for; infinite where that is not known."""
        if self._bounded or not self._seen:
            return math.inf
        each, free = self._on_device() if self._cuda else (self._saved, self._on_host())
        return self._seen + math.floor(max(0.0, _USABLE * free) / each) if each > 0 else math.inf

    def _on_device(self) -> tuple[float, float]:
        """Bytes that a sample takes at the peak, and bytes beyond that peak."""
        peak, fixed = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        free, _ = torch.cuda.mem_get_info()
        return (peak - fixed) / self._seen, free + torch.cuda.memory_reserved() - peak

    def _on_host(self) -> float:
        """What is left of this process's even share of the host's memory."""
        return memory_bytes() / self._workers - peak_memory()
