"""Map-style data: any sample can be read at any time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.data.batch import StepBatch, step_batch
from phalanx.data.dealing import Dealing
from phalanx.data.fetch import Fetcher
from phalanx.data.sampler import GlobalBatchSampler


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexedReader:
    """Reads this process's share of optimizer steps first..stop-1.

    Attributes:
        fetcher: reads and collates samples.
        sampler: which samples each step holds.
        dealing: which of them are for the parts held here, in which micro-batches.
        first: first step.
        stop: the step after the last.
    """

    fetcher: Fetcher
    sampler: GlobalBatchSampler
    dealing: Dealing
    first: int
    stop: int

    def steps(self, load: Callable[[int, np.ndarray], Any]) -> Generator[StepBatch, None, None]:
        """The steps, with ``load(epoch, ids)`` giving each micro-batch."""
        for step, epoch, ids in self.sampler.walk(self.first, self.stop):
            yield step_batch(step, epoch, ids, self.dealing.cuts(step, len(ids)), load)

    def requests(self) -> Iterator[tuple[int, np.ndarray]]:
        """What ``steps`` will ask of ``load``, in order, for those that read ahead."""
        for step, epoch, ids in self.sampler.walk(self.first, self.stop):
            for part in self.dealing.cuts(step, len(ids)):
                for start, stop in part:
                    yield epoch, ids[start:stop] if stop else ids[:1]
