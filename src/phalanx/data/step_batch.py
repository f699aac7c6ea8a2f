"""The cutting of a run's global batches, and one process's share of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from phalanx.data.sampler import HeldIds
from phalanx.errors import DataError
from phalanx.placement.batch_split import Cuts, Lane, cuts


@final
class BatchSplitter:
    """A cutter of the run's global batches for one lane, whose weights may change at a step.

    ``next`` is the first step that has not been cut yet.
    """

    def __init__(self, lane: Lane, micro: int | None, first: int = 0) -> None:
        """Begin with step ``first``; ``micro``: most samples in a micro-batch."""
        self._lanes = [(first, lane)]
        self._micro = micro
        self._known: dict[tuple[int, Lane], Cuts] = {}
        self.next = first

    def lane(self, step: int) -> Lane:
        """Return the lane with the weights of ``step``."""
        return next((lane for since, lane in reversed(self._lanes) if since <= step), self._lanes[0][1])

    def cuts(self, step: int, samples: int) -> Cuts:
        """Return the micro-batches of ``step``, whose global batch has ``samples``."""
        self.next = max(self.next, step + 1)
        key = samples, self.lane(step)
        found = self._known.get(key)
        return found if found is not None else self._known.setdefault(key, cuts(samples, key[1], self._micro))

    def change(self, weights: Sequence[float], step: int) -> None:
        """Set the weights of parts from ``step`` on. Every process must make the same call.

        Raises:
            ValueError: if that step has been cut already, in this process.
        """
        if step < self.next:
            raise ValueError(f"step {step} has been cut already; the next is {self.next}")
        since, last = self._lanes[-1]
        kept = self._lanes[:-1] if since >= step else self._lanes
        self._lanes = [*kept, (step, replace(last, weights=tuple(weights)))]
        self._known.clear()


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Samples of one forward and backward.

    Attributes:
        batch: the collated samples.
        ids: their sample ids (stream positions for a stream).
        samples: their number. 0 marks a filler: ``batch`` then holds one real sample, so that forward, backward and
            their collectives can run, but it has weight 0, and ``ids`` is empty.
    """

    batch: Any
    ids: tuple[int, ...]
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """One process's share of one optimizer step; ``step`` and ``epoch`` count from 0 over the whole run.

    Attributes:
        samples: in the **global** batch, over all processes.
        parts: for each part held by this process, its micro-batches.
        waited: seconds that this process spent reading or waiting for its workers; ``None`` if not measured.
    """

    step: int
    epoch: int
    samples: int
    parts: tuple[tuple[MicroBatch, ...], ...]
    waited: float | None = None

    @property
    def here(self) -> int:
        """Return the samples of the global batch in this process."""
        return sum(micro.samples for part in self.parts for micro in part)


def step_batch(
    step: int,
    epoch: int,
    ids: np.ndarray | HeldIds,
    pieces: Cuts,
    load: Callable[[int, Any], Any],
    *,
    whole: bool = False,
) -> StepBatch:
    """Return the step of these ``ids`` (int64): ``load(epoch, ids)`` gives each micro-batch, or the ``whole`` batch."""
    loaded = load(epoch, ids) if whole else None

    def micro(start: int, stop: int) -> MicroBatch:
        own = ids[start : stop or 1]
        batch = rows_of(loaded, slice(start, stop or 1), len(ids)) if whole else load(epoch, own)
        return MicroBatch(batch=batch, ids=tuple(own.tolist()) if stop else (), samples=stop - start)

    parts = tuple(tuple(micro(*one) for one in part) for part in pieces)
    return StepBatch(step=step, epoch=epoch, samples=len(ids), parts=parts)


def rows_of(batch: Any, rows: slice | list[int], samples: int) -> Any:
    """Return rows of a batch with ``samples`` rows, with the batch's padding."""

    def leaf(value: Any) -> Any:
        of_samples = isinstance(value, torch.Tensor) and value.dim() and len(value) == samples
        return value[rows] if of_samples or (_are_texts(value) and isinstance(rows, slice)) else value

    return tree_map(leaf, batch, is_leaf=_are_texts)


def transformed(
    transform: Callable[[Any, torch.Tensor], Any], plant: Callable[[int], None], batch: Any, ids: Any
) -> Any:
    """Return the global batch after ``job.transform``, with generators seeded by its first sample.

    Raises:
        DataError: if a tensor of it has not a row for each sample.
    """
    plant(int(ids[0]))
    found = transform(batch, torch.as_tensor(ids))
    for leaf in tree_leaves(found):
        if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) != len(ids):
            raise DataError(
                f"job.transform gave a tensor of shape {tuple(leaf.shape)} for a global batch of {len(ids)} samples\n"
                "    try: a row for each sample, or a tensor without dimensions"
            )
    return found


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str | bytes) for one in value)
