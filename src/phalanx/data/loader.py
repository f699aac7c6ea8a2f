"""The loader: the samples and batches of each step for a process, from map-style data or streams, and for
servers' workers.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import astuple, replace
from functools import partial
from types import GeneratorType
from typing import Any, final

import numpy as np

from phalanx.config.job import Job
from phalanx.data.changing_batches import ChangingBatchSampler, Stretch, never_reached
from phalanx.data.curriculum import changing_sampler, may_repeat, order_text
from phalanx.data.dataset_facts import files_digest, refuse_lists, refuse_other_order
from phalanx.data.map_style import AnySampler, Fetcher, IndexedReader, is_stream, plain
from phalanx.data.own_orders import EpochOrders
from phalanx.data.sampler import GlobalBatchSampler
from phalanx.data.step_batch import BatchSplitter, MicroBatch, StepBatch, step_batch
from phalanx.data.streams import StreamReader, StreamStep, rewound
from phalanx.data.token_batches import TokenBatchSampler, beside_token_batches
from phalanx.data.worker_processes import LoaderWorkers
from phalanx.errors import Problem, RefusedError, SpecError
from phalanx.placement.batch_split import Lane, cuts, share

Steps = Generator[StepBatch, None, None]
"""Steps in order. ``close()`` ends the worker processes at once, as dropping the last reference does."""


class _ToldData:
    """Data of a job, with the facts that processes compare before they read it."""

    length: int | None

    def __init__(self, dataset: Any, job: Job) -> None:
        self._order, self._files = partial(order_text, dataset, job), files_digest(dataset)
        self.repeats = may_repeat(dataset, job)

    @property
    def order(self) -> str | None:
        return self._order(self.length)

    @property
    def told(self) -> dict[str, Any]:
        """Return the facts that must be equal in every process and after a resume.

        ``length`` is ``None`` for a stream. ``order`` is empty if (seed, epoch) fixes the order. ``files`` identifies
        the files read, and is empty if unknown.
        """
        return {"length": self.length, "order": self.order or "", "files": self._files}


@final
class Loader(_ToldData):
    """The steps of a run, in order, for the parts of ``lane``. Each ``iter()`` starts at ``first_step``.

    Attributes:
        length: samples in the data; ``None`` for a stream.
        epoch_samples: samples in an epoch: ``length``, or the number of ``job.sampler``; ``None`` for a stream.
        steps_per_epoch: ``None`` for a stream, and if batch or data change with the step.
        repeats: whether a sampler may give a sample twice in a pass.
        stretches: of the run, if batch or data change with the step; else none.
        remarks: a sentence for each batch setting that the run never reaches.
        total_steps: the step after the last; ``None`` for a stream that ends with its epochs.
    """

    def __init__(
        self,
        dataset: Any,
        job: Job,
        lane: Lane,
        *,
        micro: int | None,
        first_step: int = 0,
        total_steps: int | None = None,
        pin_memory: bool = False,
    ) -> None:
        """Plan the reading; no sample is read and no process started before ``iter()``.

        Args:
            dataset: map-style (``__getitem__``, ``__len__``) or a stream (``__iter__``).
            job: for batch, batch_ramp, batch_tokens, seed, shuffle, sampler, drop_last, collate, workers, prefetch,
                epochs, steps.
            lane: the parts of each global batch held by this process.
            micro: most samples in a micro-batch; ``None``: a part's whole share.
            first_step: optimizer step to start with, to resume.
            total_steps: the step after the last; ``None``: from ``job.steps`` or ``job.epochs``.
            pin_memory: copy batches to pinned host memory.

        Raises:
            SpecError: if data and job do not fit: no sample, all samples dropped, a stream with shuffle, batch_ramp or
                batch_tokens, a wrong number of lengths, a px.Curriculum with epochs, a sampler with unknown indices, or
                neither map-style data nor a stream.
        """
        stream = is_stream(dataset)
        dataset = rewound(dataset) if stream else dataset
        super().__init__(dataset, job)
        self._anew = partial(Loader, dataset, job, lane, micro=micro, total_steps=total_steps, pin_memory=pin_memory)
        self._workers = LoaderWorkers(count=job.workers, prefetch=job.prefetch, pin_memory=pin_memory, seed=job.seed)
        self._dealing = BatchSplitter(lane, micro, first_step)
        self._reader: IndexedReader | StreamReader
        self.length = None
        self.epoch_samples: int | None = None
        self.steps_per_epoch: int | None = None
        self.stretches: tuple[Stretch, ...] = ()
        self.remarks: list[str] = []
        self.total_steps: int | None = job.steps if total_steps is None else total_steps
        if stream:
            _refuse_one_pass(dataset, job, self.total_steps)
            self._reader = _stream_reader(dataset, job, self._dealing, (first_step, self.total_steps))
            return
        sampler = _sampler(dataset, job)
        self.length, self.epoch_samples = len(dataset), sampler.length
        self.steps_per_epoch, self.stretches = sampler.steps_per_epoch, _stretches(sampler)
        if self.total_steps is None:
            self.total_steps = sampler.steps_of(job.epochs or 1)
        self.remarks = _remarks(sampler, self.total_steps)
        self._reader = IndexedReader(
            fetcher=Fetcher(dataset, job.collate, job.seed, job.transform),
            sampler=sampler,
            splitter=self._dealing,
            first=first_step,
            stop=self.total_steps,
            size=len(dataset),
        )

    def example(self, count: int) -> Any:
        """Return the first ``count`` samples of the data, collated: the same on every rank."""
        return self._reader.example(count)

    @property
    def looked_at(self) -> str:
        """Return a note on the samples used by ``example`` and ``spread``, for data that change; else ""."""
        return self._reader.looked_at() if isinstance(self._reader, IndexedReader) else ""

    def spread(self, count: int) -> Iterator[tuple[int, Any]]:
        """Yield place and batch of up to ``count`` single samples spread over the data; a stream's first ones."""
        for place in self._reader.spread(count):
            yield place, self.collate([place])

    def collate(self, places: Sequence[int]) -> Any:
        """Collate the samples at these places; for a stream, samples read by ``spread``."""
        return self._reader.collated(places)

    @property
    def next_step(self) -> int:
        """Return the first step that has not been read yet, reading ahead included."""
        return self._dealing.next

    @property
    def deals_here(self) -> bool:
        """Return True if this process cuts batches, so that ``set_weights`` works; False for streams with workers."""
        return isinstance(self._reader, IndexedReader) or not self._workers.count

    def lane(self, step: int) -> Lane:
        """Return the parts held here, with the weights of ``step``."""
        return self._dealing.lane(step)

    def set_weights(self, weights: Sequence[float], step: int) -> None:
        """Set the weights of parts (``Lane.weights``) from ``step`` on, on every process.

        Raises:
            ValueError: if that step has been read already, or workers of a stream cut the batches.
        """
        if not self.deals_here:
            raise ValueError("the processes that read this stream deal it out by themselves")
        self._dealing.change(weights, step)

    def starting_at(self, step: int) -> Loader:
        """Return a loader of the same data, parts and length that starts at ``step``."""
        return self._anew(first_step=step)

    def __iter__(self) -> Steps:
        if isinstance(self._reader, IndexedReader):
            return _timed(_indexed_steps(self._reader, self._workers))
        return _timed(_stream_steps(self._reader, self._workers))


def evaluation_batches(dataset: Any, job: Job, lane: Lane, *, micro: int | None) -> Steps:
    """Return each sample of map-style data exactly once, in order, in global batches of ``job.batch``.

    No sample is repeated to even out ranks: a part without samples gets fillers of weight 0. Random draws of samples
    are the same in every evaluation.

    Raises:
        SpecError: if the data are a stream, or hold no sample.
    """
    if is_stream(dataset, "job.evaluate"):
        given, allowed = f"a stream ({type(dataset).__name__})", "map-style data (__getitem__ and __len__)"
        fix = "evaluate=lambda: list(stream)"
        raise SpecError([Problem(where="job.evaluate", given=given, allowed=allowed, fix=fix)])
    sampler = _in_order(dataset, job)
    reader = IndexedReader(
        fetcher=Fetcher(dataset, job.collate, job.seed),
        sampler=sampler,
        splitter=BatchSplitter(lane, micro),
        first=0,
        stop=sampler.steps_per_epoch,
        size=len(dataset),
    )
    workers = LoaderWorkers(count=job.workers, prefetch=job.prefetch, pin_memory=False, seed=job.seed)
    return _indexed_steps(reader, workers)


def _refuse_one_pass(dataset: Any, job: Job, total_steps: int | None) -> None:
    if total_steps is not None or (job.epochs or 1) == 1 or not isinstance(dataset, GeneratorType):
        return
    given = f"a generator, which can be read once, for {job.epochs} epochs"
    allowed = "data that begin anew with each epoch: a class whose __iter__ yields the samples, or map-style data"
    fix = "data=lambda: list(samples()), or epochs=1"
    raise SpecError([Problem(where="job.data", given=given, allowed=allowed, fix=fix)])


def _in_order(dataset: Any, job: Job) -> GlobalBatchSampler:
    refuse_lists(dataset, job.collate, "job.evaluate")
    if not len(dataset):
        raise SpecError.of("job.evaluate", "data of 0 samples", "1 sample or more", "evaluate=None, for no evaluation")
    return GlobalBatchSampler(length=len(dataset), batch=job.batch, seed=job.seed, shuffle=False)


def _sampler(dataset: Any, job: Job) -> AnySampler:
    refuse_lists(dataset, job.collate)
    refuse_other_order(dataset, job.sampler)
    if changing := changing_sampler(dataset, job):
        return changing
    orders = EpochOrders.of(job, len(dataset))
    return GlobalBatchSampler(
        length=len(dataset) if orders is None else orders.length,
        batch=job.batch,
        seed=job.seed,
        shuffle=job.shuffle is not False,
        drop_last=job.drop_last,
        orders=orders,
    )


def _stretches(sampler: AnySampler) -> tuple[Stretch, ...]:
    return sampler.stretches if isinstance(sampler, ChangingBatchSampler) else ()


def _remarks(sampler: AnySampler, total_steps: int | None) -> list[str]:
    if isinstance(sampler, TokenBatchSampler):
        return sampler.remarks()
    return never_reached(_stretches(sampler), total_steps)


def _timed(steps: Steps) -> Steps:
    with closing(steps):
        while True:
            began = time.perf_counter()
            batch = next(steps, None)
            if batch is None:
                return
            yield replace(batch, waited=time.perf_counter() - began)


def _indexed_steps(reader: IndexedReader, workers: LoaderWorkers) -> Steps:
    if not workers.needed:
        yield from reader.steps(reader.fetcher.fetch)
        return
    with workers.indexed(reader.fetcher, reader.requests()) as results:
        yield from reader.steps(lambda epoch, ids: next(results))


def _stream_reader(dataset: Any, job: Job, dealing: BatchSplitter, steps: tuple[int, int | None]) -> StreamReader:
    if job.batch_tokens is not None:
        raise beside_token_batches(dataset)
    beside = {
        "sampler": (job.sampler, "a sampler", "a stream keeps its own order"),
        "batch_ramp": (job.batch_ramp, "a batch_ramp", "a stream is read in batches of one size"),
        "shuffle": (
            job.shuffle,
            "shuffle=True",
            "a stream keeps its own order; shuffle inside it, by set_epoch(epoch)",
        ),
    }
    for name, (given, what, why) in beside.items():
        if given:
            allowed = f"{name} with map-style data (__getitem__ and __len__): {why}"
            raise SpecError.of(
                f"job.{name}", f"{what} with a stream ({type(dataset).__name__})", allowed, f"{name}=None"
            )
    refuse_lists(dataset, job.collate)
    return StreamReader(
        dataset=dataset,
        batch=job.batch,
        splitter=dealing,
        seed=job.seed,
        drop_last=job.drop_last,
        collate=plain(job.collate) if job.collate else None,
        transform=job.transform,
        first_step=steps[0],
        total_steps=steps[1],
        epochs=job.epochs,
    )


def _stream_steps(reader: StreamReader, workers: LoaderWorkers) -> Steps:
    with workers.stream(reader) if workers.needed else nullcontext(reader.groups()) as groups:
        yield from (_of_group(reader, group) for group in groups)


def _of_group(reader: StreamReader, group: StreamStep) -> StepBatch:
    ids = np.arange(group.position, group.position + group.samples, dtype=np.int64)
    pieces, batches = reader.splitter.cuts(group.step, group.samples), iter(group.batches)
    whole = reader.transform is not None
    return step_batch(group.step, group.epoch, ids, pieces, lambda *_: next(batches), whole=whole)


def stream_problems(dataset: Any, parts: int, *, once: bool = False) -> list[Problem]:
    """Return the problem of a stream as ``dataset`` of ``BatchPieces``; ``once`` for an evaluation."""
    if not is_stream(dataset):
        return []
    given = f"a stream ({type(dataset).__name__}) under a plan with servers"
    allowed = "map-style data (__getitem__ and __len__): whoever is free reads the next piece"
    return [Problem(where="job.evaluate" if once else "job.data", given=given, allowed=allowed, fix=f"dp={parts}")]


@final
class BatchPieces(_ToldData):
    """Every global batch of a job over map-style data, cut into a contiguous piece for each worker.

    The data have ``length`` samples, an epoch ``epoch_samples``, and ``total_steps`` is the step after the last.
    ``stretches`` and ``remarks`` are as in ``Loader``.
    """

    def __init__(self, dataset: Any, job: Job, parts: int, *, micro: int | None, once: bool = False) -> None:
        """Plan the reading without reading.

        Args:
            dataset: map-style.
            job: for batch, batch_ramp, batch_tokens, seed, shuffle, sampler, drop_last, collate, epochs and steps.
            parts: pieces of each global batch.
            micro: most samples in a micro-batch; ``None``: the whole piece.
            once: each sample once and in order, as for an evaluation.

        Raises:
            RefusedError: if the data are a stream.
        """
        if problems := stream_problems(dataset, parts, once=once):
            raise RefusedError(problems)
        self._sampler = _in_order(dataset, job) if once else _sampler(dataset, job)
        self._fetcher = Fetcher(dataset, job.collate, job.seed, None if once else job.transform)
        super().__init__(dataset, job)
        self._parts, self._micro = parts, micro
        self.length, self.epoch_samples = len(dataset), self._sampler.length
        self.stretches = _stretches(self._sampler)
        taken = None if once else job.steps
        self.total_steps = self._sampler.steps_of(1 if once else job.epochs or 1) if taken is None else taken
        self.remarks = _remarks(self._sampler, self.total_steps)

    def sizes(self, step: int) -> tuple[int, ...]:
        """Return the samples in each piece of ``step``; 0 if a short batch leaves a piece empty."""
        total = self._sampler.samples(step)
        return tuple(stop - start for start, stop in (share(total, part, self._parts) for part in range(self._parts)))

    def epoch(self, step: int) -> int:
        """Return the pass over the data of ``step``."""
        return self._sampler.epoch_of(step)

    def ids(self, step: int, part: int) -> np.ndarray:
        """Return the sample ids of a piece."""
        start, stop = share(self._sampler.samples(step), part, self._parts)
        return self._sampler.ids(step)[start:stop]

    def micros(self, step: int, part: int) -> list[MicroBatch]:
        """Read and return the micro-batches of a piece."""
        ids, epoch = self._sampler.ids(step), self.epoch(step)
        (ranges,) = cuts(len(ids), Lane(first=part, count=1, parts=self._parts), self._micro)
        held = (tuple(one for one in ranges if one[1]),)
        found = step_batch(step, epoch, ids, held, self._fetcher.fetch, whole=self._fetcher.transform is not None)
        return list(found.parts[0])


def data_facts(data: Loader | BatchPieces) -> dict[str, Any]:
    """Return the data's fields of the event ``start``."""
    return {
        "samples": data.length,
        "epoch_samples": data.epoch_samples,
        "repeats": data.repeats,
        "stretches": [list(astuple(one)) for one in data.stretches],
    }
