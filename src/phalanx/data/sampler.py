"""Which samples each optimizer step holds: a pure function of the step, and of nothing that depends on devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from phalanx.data.permutation import LARGEST, Permutation
from phalanx.errors import Problem, SpecError

_BLOCK = 8192  # ids that walk() computes at once: a pause of 0.2 ms, and a few ns an id


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalBatchSampler:
    """The sample ids of every global batch of a run over map-style data.

    Each epoch is a permutation of all samples, keyed by (seed, epoch), cut into global batches in order. Any step is
    computed by itself, in memory and time that do not depend on the length of the data or on the step.

    Attributes:
        length: samples in the data.
        batch: samples in a global batch.
        seed: of the order.
        shuffle: whether epochs are permuted; if not, each is 0..length-1.
        drop_last: whether the last, partial batch of each epoch is left out.

    Raises:
        SpecError: if there is no sample, or if ``drop_last`` would drop all of them.
    """

    length: int
    batch: int
    seed: int
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise SpecError(problems)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in a pass over the data."""
        return self.length // self.batch if self.drop_last else -(-self.length // self.batch)

    def epoch_of(self, step: int) -> int:
        """The epoch, 0-based, that optimizer step ``step`` belongs to."""
        return step // self.steps_per_epoch

    def samples(self, step: int) -> int:
        """Samples in the global batch of ``step``: ``batch``, or fewer in the last of an epoch."""
        first = step % self.steps_per_epoch * self.batch
        return min(self.batch, self.length - first)

    def ids(self, step: int) -> np.ndarray:
        """The sample ids, int64, of the whole global batch of optimizer step ``step`` (0-based over the run).

        Raises:
            ValueError: if ``step`` is negative.
        """
        if step < 0:
            raise ValueError(f"steps count from 0; given {step}")
        return next(self.walk(step, step + 1))[2]

    def walk(self, first: int, stop: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """``(step, epoch, ids)`` of steps first..stop-1, computed some thousand ids at a time."""
        step = first
        while step < stop:
            epoch, index = divmod(step, self.steps_per_epoch)
            last = min(stop - step, self.steps_per_epoch - index) + index
            order = Permutation.keyed(self.length, self.seed, epoch) if self.shuffle else None
            at_once = max(1, _BLOCK // self.batch)
            for begin in range(index, last, at_once):
                end = min(begin + at_once, last)
                ids = np.arange(begin * self.batch, min(end * self.batch, self.length), dtype=np.int64)
                if order is not None:
                    ids = order(ids)
                for offset in range(end - begin):
                    yield step, epoch, ids[offset * self.batch : (offset + 1) * self.batch]
                    step += 1


def _problems(sampler: GlobalBatchSampler) -> list[Problem]:
    found: list[Problem] = []
    if sampler.batch < 1:
        found.append(
            Problem(where="job.batch", given=str(sampler.batch), allowed="1 sample or more a step", fix="batch=32")
        )
    if not 1 <= sampler.length <= LARGEST:
        found.append(
            Problem(
                where="job.data",
                given=f"data of {sampler.length} samples",
                allowed="1 sample or more",
                fix="data=lambda: dataset    # with len(dataset) >= 1",
            )
        )
    elif sampler.drop_last and sampler.length < sampler.batch:
        found.append(
            Problem(
                where="job.drop_last",
                given=f"drop_last=True with {sampler.length} samples and batch={sampler.batch}: nothing would be left",
                allowed="a batch no larger than the data, or drop_last=False",
                fix=f"batch={sampler.length}",
            )
        )
    return found
