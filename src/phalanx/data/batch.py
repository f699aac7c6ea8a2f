"""What the loader gives: micro-batches, and the step they belong to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.data.shares import Cuts


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Samples of one forward and backward.

    Attributes:
        batch: the collated samples.
        ids: their sample ids (stream positions for a stream).
        samples: how many they are. 0 marks a filler: ``batch`` then holds one real sample, so that forward and
            backward and their collectives can run, but it weighs nothing, and ``ids`` is empty.
    """

    batch: Any
    ids: tuple[int, ...]
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """What one process needs of one optimizer step.

    Attributes:
        step: optimizer step, 0-based over the whole run.
        epoch: pass over the data, 0-based.
        samples: in the **global** batch, over all processes.
        parts: for each part held by this process, its micro-batches.
    """

    step: int
    epoch: int
    samples: int
    parts: tuple[tuple[MicroBatch, ...], ...]

    @property
    def here(self) -> int:
        """Samples of the global batch that this process holds."""
        return sum(micro.samples for part in self.parts for micro in part)


def step_batch(
    step: int, epoch: int, ids: np.ndarray, pieces: Cuts, load: Callable[[int, np.ndarray], Any]
) -> StepBatch:
    """The step whose global batch has these ``ids`` (int64), with ``load(epoch, ids)`` giving each micro-batch."""
    parts: list[tuple[MicroBatch, ...]] = []
    for part in pieces:
        micros: list[MicroBatch] = []
        for start, stop in part:
            if stop:
                own = ids[start:stop]
                batch = load(epoch, own)
                micros.append(MicroBatch(batch=batch, ids=tuple(own.tolist()), samples=stop - start))
            else:
                micros.append(MicroBatch(batch=load(epoch, ids[:1]), ids=(), samples=0))
        parts.append(tuple(micros))
    return StepBatch(step=step, epoch=epoch, samples=len(ids), parts=tuple(parts))
