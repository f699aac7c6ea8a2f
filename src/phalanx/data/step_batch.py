"""The global batches of a run's steps as they are cut, and what one process has of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from phalanx.data.sampler import HeldIds
from phalanx.placement.batch_split import Cuts, Lane, cuts


@final
class BatchSplitter:
    """Cuts the global batches of a run's steps for one lane, whose weights may change from a step on.

    ``next`` is the first step that has not been cut yet, and all after it have not.
    """

    def __init__(self, lane: Lane, micro: int | None, first: int = 0) -> None:
        """``micro``: most samples in a micro-batch. ``first``: the step to begin with."""
        self._lanes = [(first, lane)]
        self._micro = micro
        self._known: dict[tuple[int, Lane], Cuts] = {}
        self.next = first

    def lane(self, step: int) -> Lane:
        """The lane with the weights that hold in ``step``."""
        return next((lane for since, lane in reversed(self._lanes) if since <= step), self._lanes[0][1])

    def cuts(self, step: int, samples: int) -> Cuts:
        """The micro-batches of ``step``, whose global batch has ``samples``."""
        self.next = max(self.next, step + 1)
        key = samples, self.lane(step)
        found = self._known.get(key)
        return found if found is not None else self._known.setdefault(key, cuts(samples, key[1], self._micro))

    def change(self, weights: Sequence[float], step: int) -> None:
        """From ``step`` on parts have these weights. Every process has to be told the same.

        Raises:
            ValueError: if that step has been cut already, in this process.
        """
        if step < self.next:
            raise ValueError(f"step {step} has been dealt out already; the next is {self.next}")
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
        samples: how many they are. 0 marks a filler: ``batch`` then holds one real sample, so that forward and
            backward and their collectives can run, but it weighs nothing, and ``ids`` is empty.
    """

    batch: Any
    ids: tuple[int, ...]
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """What one process needs of one optimizer step; ``step`` and ``epoch`` count from 0 over the whole run.

    Attributes:
        samples: in the **global** batch, over all processes.
        parts: for each part held by this process, its micro-batches.
        waited: seconds that this process waited for them, reading or for its workers; ``None`` where nobody looked.
    """

    step: int
    epoch: int
    samples: int
    parts: tuple[tuple[MicroBatch, ...], ...]
    waited: float | None = None

    @property
    def here(self) -> int:
        """Samples of the global batch that this process holds."""
        return sum(micro.samples for part in self.parts for micro in part)


def step_batch(
    step: int, epoch: int, ids: np.ndarray | HeldIds, pieces: Cuts, load: Callable[[int, np.ndarray], Any]
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
