"""Pieces of any global batch at any time, for workers that are dealt now this one, now that."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from phalanx.data.batch import MicroBatch
from phalanx.data.fetch import Fetcher, is_stream
from phalanx.data.sampler import GlobalBatchSampler
from phalanx.data.shares import Lane, cuts, share
from phalanx.errors import Problem, RefusedError
from phalanx.spec.job import Job


@final
class Pieces:
    """Every global batch of a job over map-style data, cut into as many contiguous pieces as there are workers.

    Attributes:
        length: samples in the data.
        total_steps: the step after the last.
    """

    def __init__(self, dataset: Any, job: Job, parts: int, *, micro: int | None, once: bool = False) -> None:
        """Plans the reading; nothing is read.

        Args:
            dataset: map-style.
            job: for batch, seed, shuffle, drop_last, collate, epochs and steps.
            parts: pieces of each global batch.
            micro: most samples in a micro-batch; ``None``: the whole piece.
            once: each sample once and in order, as for an evaluation.

        Raises:
            RefusedError: if the data are a stream.
        """
        if is_stream(dataset):
            raise RefusedError(
                [
                    Problem(
                        where="job.evaluate" if once else "job.data",
                        given=f"a stream ({type(dataset).__name__}) under a plan with servers",
                        allowed="map-style data (__getitem__ and __len__): whoever is free reads the next piece",
                        fix=f"dp={parts}",
                    )
                ]
            )
        self._sampler = GlobalBatchSampler(
            length=len(dataset),
            batch=job.batch,
            seed=job.seed,
            shuffle=job.shuffle is not False and not once,
            drop_last=job.drop_last and not once,
        )
        self._fetcher = Fetcher(dataset, job.collate, job.seed)
        self._parts, self._micro = parts, micro
        self.length = self._sampler.length
        each = self._sampler.steps_per_epoch
        self.total_steps = each if once else job.steps if job.steps is not None else (job.epochs or 1) * each

    def sizes(self, step: int) -> tuple[int, ...]:
        """Samples in each piece of ``step``; 0 where a short batch leaves one nothing."""
        total = self._sampler.samples(step)
        return tuple(stop - start for start, stop in (share(total, part, self._parts) for part in range(self._parts)))

    def epoch(self, step: int) -> int:
        """The pass over the data that ``step`` belongs to."""
        return self._sampler.epoch_of(step)

    def ids(self, step: int, part: int) -> np.ndarray:
        """The sample ids of a piece."""
        start, stop = share(self._sampler.samples(step), part, self._parts)
        return self._sampler.ids(step)[start:stop]

    def micros(self, step: int, part: int) -> list[MicroBatch]:
        """The micro-batches of a piece, read now."""
        ids, epoch = self._sampler.ids(step), self.epoch(step)
        (ranges,) = cuts(len(ids), Lane(first=part, count=1, parts=self._parts), self._micro)
        return [
            MicroBatch(
                batch=self._fetcher.fetch(epoch, ids[start:stop]),
                ids=tuple(ids[start:stop].tolist()),
                samples=stop - start,
            )
            for start, stop in ranges
            if stop
        ]
