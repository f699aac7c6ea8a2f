"""Map-style data: any sample can be read at any time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phalanx.data.batch import StepBatch, step_batch
from phalanx.data.fetch import Fetcher
from phalanx.data.sampler import GlobalBatchSampler
from phalanx.data.shares import Cuts, Lane, cuts


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexedReader:
    """Reads this process's share of optimizer steps first..stop-1.

    Attributes:
        fetcher: reads and collates samples.
        sampler: which samples each step holds.
        lane: the parts held here.
        micro: most samples in a micro-batch.
        first: first step.
        stop: the step after the last.
    """

    fetcher: Fetcher
    sampler: GlobalBatchSampler
    lane: Lane
    micro: int | None
    first: int
    stop: int
    _cuts: dict[int, Cuts] = field(default_factory=dict, init=False)

    def steps(self, load: Callable[[int, np.ndarray], Any]) -> Generator[StepBatch, None, None]:
        """The steps, with ``load(epoch, ids)`` giving each micro-batch."""
        for step, epoch, ids in self.sampler.walk(self.first, self.stop):
            yield step_batch(step, epoch, ids, self._cuts_of(len(ids)), load)

    def requests(self) -> Iterator[tuple[int, np.ndarray]]:
        """What ``steps`` will ask of ``load``, in order, for those that read ahead."""
        for _, epoch, ids in self.sampler.walk(self.first, self.stop):
            for part in self._cuts_of(len(ids)):
                for start, stop in part:
                    yield epoch, ids[start:stop] if stop else ids[:1]

    def _cuts_of(self, samples: int) -> Cuts:
        # A run meets two sizes: the whole batch and the last of an epoch.
        found = self._cuts.get(samples)
        return found if found is not None else self._cuts.setdefault(samples, cuts(samples, self.lane, self.micro))
