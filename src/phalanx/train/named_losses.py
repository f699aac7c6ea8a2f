"""Losses by name in one step: each is divided by its own count over the global batch, known before backward or equal.

Gradients are divided once, by the count of the first loss. Another loss's sum is therefore multiplied by the first
one's count over its own before backward runs. If the job tells counts from the batch, they are added up over micro-
batches and ranks before the first forward; if the whole batch is computed at once, they are known; otherwise they must
be the same for all names, which is checked before the update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm import active
from phalanx.config.losses import COUNTS, Losses, NamedLosses
from phalanx.data import StepBatch
from phalanx.device_kinds import widened
from phalanx.errors import LossError
from phalanx.train.loss import LossReading, Shares, check_count, read_loss


class NamedCounts:
    """The conversion of one step's losses to one count."""

    def __init__(self, losses: Losses, step: int, *, whole: bool) -> None:
        """Take the losses; ``whole``: the loss is called once, with all of the global batch."""
        self._losses, self._step, self._whole = losses, step, whole
        self._told: list[float] = []
        self._shares: Shares | None = None

    def count(self, batch: StepBatch, device: torch.device, *, counts: bool) -> None:
        """Add up the job's counts of the batch, with this rank's samples if ``counts``. Collective.

        Raises:
            LossError: the count of a loss is 0.
        """
        if self._losses.counts is None or self._whole:
            return
        micros = [micro for part in batch.parts for micro in part if micro.samples and counts]
        rows = [self._losses.counted(micro.batch, micro.samples) for micro in micros]
        added = torch.tensor(rows or [[0.0] * len(self._losses.names)], dtype=torch.float64).sum(0)
        if active():
            added = added.to(device)
            dist.all_reduce(added)
        self._told = added.tolist()
        for count in self._told:
            check_count(self._step, count)
        self._shares = [self._told[0] / count for count in self._told]

    def read(self, result: Any, samples: int) -> LossReading:
        """Read the job's loss of a micro-batch, like ``read_loss``."""
        assert isinstance(result, NamedLosses)
        read = read_loss(result, samples, self._step, self._shares)
        if not self._whole or read.mean or not samples:
            return read
        return read_loss(result, samples, self._step, [_share(read.count, count) for _, count in read.named])

    def check(self, counts: Sequence[float]) -> None:
        """Raise if ``counts`` over the global batch are not the divisors used for gradients.

        Raises:
            LossError: they differ by name without having been told, differ from those told, or are 0.
        """
        if not self._whole:
            check_alike(self._step, self._losses.names, counts, self._told)
        for count in counts:
            check_count(self._step, count)


def check_alike(step: int, names: Sequence[str], counts: Sequence[float], told: Sequence[float] = ()) -> None:
    """Raise if counts by name differ from ``told``, or, without it, from each other.

    Raises:
        LossError: with an advice.
    """
    if why := unlike(names, counts, told):
        raise LossError(f"in step {step} {why}\n    try: {COUNTS}")


def unlike(names: Sequence[str], counts: Sequence[float], told: Sequence[float]) -> str:
    """Return the error in ``counts`` by name, in words: they differ from ``told``, or without it from each other."""
    for name, count, expected in zip(names, counts, told or list(counts[:1]) * len(counts), strict=True):
        if math.isclose(count, expected, rel_tol=_SAME):
            continue
        if told:
            return f"the loss {name} counts {count:g}, and counts of px.Losses told {expected:g}"
        return (
            f"the loss {name} counts {count:g} and {names[0]} {expected:g}: where a plan splits the batch, counts that "
            "differ have to be known before backward"
        )
    return ""


_SAME = 1e-6
"""Relative difference up to which two counts are the same: weights may be summed in another order."""


def _share(first: Any, count: Any) -> Any:
    if isinstance(count, Tensor):
        return widened(torch.as_tensor(first, device=count.device)) / count.where(count != 0, 1)
    return first / (count or 1)
