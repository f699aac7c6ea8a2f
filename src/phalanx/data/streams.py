"""Streams: data that can only be read in order.

The order is the stream's own: the sample at position p of a pass belongs to global batch ``p // batch`` of that pass,
and its position is its id. **Every rank reads the whole stream** and keeps its share: reading costs the same on any
number of ranks, and a rank holds the samples of one global batch at a time before they are collated. In return a global
batch is the same on any number of ranks, and each rank knows the size of the last one without asking. If reading is the
bottleneck, map-style data scale better.

With worker processes, each of w workers reads the whole stream and collates every w-th global batch.

A dataset may offer:

- ``set_epoch(epoch)``, called before each pass, to shuffle in another order; an epoch shared with other processes
  becomes each process's own, because each begins its passes by itself;
- ``seek(position)``, called before each pass: the next ``iter()`` starts at this sample of the pass, and a position
  at or past the end gives an empty pass. Without it a resumed run reads and drops the samples already seen.

A stream with ``state_dict`` and ``load_state_dict``, and neither of the above, is put back to its first state before
each pass; nodes of ``torchdata.nodes`` are asked for one pass after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch.utils.data import default_collate

from phalanx.data.sampler import EpochSeeds
from phalanx.data.shared_epoch import with_own_epoch
from phalanx.data.step_batch import BatchSplitter, transformed
from phalanx.errors import DataError, SpecError


class StreamStep(NamedTuple):
    """The collated micro-batches of one step, part after part. A tuple, because torch can pin that.

    Its global batch has ``samples``, and begins at ``position`` of the pass.
    """

    step: int
    epoch: int
    position: int
    samples: int
    batches: list[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamReader:
    """A reader of a stream's global batches that collates this process's share.

    Attributes:
        splitter: the micro-batches of the parts held here.
        first_step: the first step to read.
        total_steps: the step after the last; passes follow one another until then. ``None``: after ``epochs`` passes.
    """

    dataset: Any
    batch: int
    splitter: BatchSplitter
    seed: int
    drop_last: bool
    collate: Callable[[list[Any]], Any] | None
    transform: Callable[[Any, Any], Any] | None
    first_step: int
    total_steps: int | None
    epochs: int | None
    _spread: list[Any] = field(default_factory=list[Any])

    def groups(self, worker: int = 0, workers: int = 1) -> Iterator[StreamStep]:
        """Yield steps ``first_step + worker``, and every ``workers``-th after it."""
        for step, epoch, position, samples in self._global_batches():
            if step >= self.first_step and (step - self.first_step) % workers == worker:
                pieces = [piece for part in self.splitter.cuts(step, len(samples)) for piece in part]
                pieces = [(0, len(samples))] if self.transform else pieces
                batches = self._collated(epoch, position, samples, pieces)
                yield StreamStep(step, epoch, position, len(samples), batches)

    def example(self, count: int) -> Any:
        """Return the first ``count`` samples of the first pass, collated."""
        return self._looked_at(next(self._pass(0, 0), [])[:count])

    def spread(self, count: int) -> Iterator[int]:
        """Yield the places of the first ``count`` samples of the first pass, each once it has been read."""
        self._spread.clear()
        for place, sample in enumerate(islice(chain.from_iterable(self._pass(0, 0)), count)):
            self._spread.append(sample)
            yield place

    def collated(self, places: Sequence[int]) -> Any:
        """Return samples read by ``spread``, collated."""
        return self._looked_at([self._spread[place] for place in places])

    def _looked_at(self, samples: list[Any]) -> Any:
        return self._collated(0, 0, samples, [(0, len(samples))])[0]

    def _collated(self, epoch: int, position: int, samples: list[Any], pieces: Sequence[tuple[int, int]]) -> list[Any]:
        seeds, collate = EpochSeeds.of(self.seed, epoch), self.collate or default_collate
        batches: list[Any] = []
        for start, stop in pieces:
            if self.collate:
                seeds.plant(position + start)
            batches.append(collate(samples[start : stop or 1]))
        if self.transform:
            ids = range(position, position + len(samples))
            return [transformed(self.transform, seeds.plant, batches[0], ids)]
        return batches

    def _global_batches(self) -> Iterator[tuple[int, int, int, list[Any]]]:
        if self.total_steps is not None and self.first_step >= self.total_steps:
            return
        sought = self.first_step if hasattr(self.dataset, "seek") else 0
        step, epoch, position = sought, 0, sought * self.batch
        while self.total_steps is not None or epoch < (self.epochs or 1):
            before = step
            for samples in self._pass(epoch, position):
                yield step, epoch, position, samples
                step, position = step + 1, position + len(samples)
                if step == self.total_steps:
                    return
            if step > before:
                epoch, position = epoch + 1, 0
            elif sought:
                # Past the end of the first pass: only reading from the start tells how many steps a pass has.
                sought = step = epoch = position = 0
            else:
                raise DataError(
                    f"pass {epoch + 1} over the stream ({type(self.dataset).__name__}) gave no "
                    f"{'whole batch' if self.drop_last else 'sample'}: each iter() has to start from the beginning"
                    + (f" and give at least batch={self.batch} samples, or set drop_last=False" * self.drop_last)
                )

    def _pass(self, epoch: int, position: int) -> Iterator[list[Any]]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        if hasattr(self.dataset, "seek"):
            self.dataset.seek(position)
        seeds = EpochSeeds.of(self.seed, epoch)
        seeds.plant(position)
        stream = iter(self.dataset)
        while samples := list(islice(stream, self.batch)):
            if len(samples) == self.batch or not self.drop_last:
                yield samples
            position += len(samples)
            seeds.plant(position)


def rewound(dataset: Any) -> Any:
    """Return ``dataset`` with an epoch that belongs to this process.

    A dataset that keeps its place begins each pass at its present place; nodes begin their own next pass.

    Raises:
        SpecError: if its nodes make batches.
    """
    nodes = _nodes(dataset)
    if any(type(node).__name__ == "Batcher" for node in nodes):
        given = f"a {type(dataset).__name__} of nodes with a Batcher, which makes batches of its own"
        allowed = "nodes that give samples: ranks are given their shares of global batches of job.batch"
        raise SpecError.of("job.data", given, allowed, "data=lambda: node, without the Batcher, and batch of the job")
    if nodes:
        return _Nodes(dataset)
    keeps = all(hasattr(dataset, name) for name in ("__iter__", "state_dict", "load_state_dict"))
    if not keeps or any(hasattr(dataset, name) for name in ("__getitem__", "set_epoch", "seek")):
        return with_own_epoch(dataset)
    return _Rewound(dataset, deepcopy(dataset.state_dict()))


@dataclass(frozen=True, slots=True)
class _Rewound:
    """A stream whose ``iter()`` always begins at ``start``."""

    dataset: Any
    start: Any

    def __iter__(self) -> Iterator[Any]:
        self.dataset.load_state_dict(deepcopy(self.start))
        return iter(self.dataset)


class _Nodes:
    """A stream of ``torchdata.nodes``, or of a ``Loader`` of them; each ``iter()`` is the next pass.

    Only a job that asks for the first pass again gets the first pass.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset, self._epoch = dataset, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        begin = _begun.get(id(self._dataset))
        if begin is None:
            begin = _begun[id(self._dataset)] = _Begin(generators=_generators_of(self._dataset))
            finalize(self._dataset, _begun.pop, id(self._dataset), None)
            stream = self._pass(None)
            begin.state = deepcopy(_state_of(self._dataset))
            return stream
        if self._epoch == 0:
            return self._pass(begin.again(type(self._dataset).__name__))
        begin.passes += 1
        if self._epoch != begin.passes:
            given = f"one {type(self._dataset).__name__} that two read at a time"
            raise DataError(
                f"{given}, each from the begin\n    try: data=lambda: {_ANEW}, which makes nodes of its own"
            )
        return self._pass(None)

    def _pass(self, state: Any) -> Iterator[Any]:
        if not _is_node(self._dataset):
            if state is not None:
                self._dataset.load_state_dict(state)
            return iter(self._dataset)
        self._dataset.reset() if state is None else self._dataset.reset(state)
        return iter(self._dataset)


_ANEW = "torchdata.nodes.Loader(make_node())"


@dataclass(slots=True)
class _Begin:
    """The start of the first pass over nodes, and the number of passes since.

    Attributes:
        generators: of samplers, which no node keeps in its state, with the state of each.
        state: of the nodes; ``None`` if they have none.
    """

    generators: list[tuple[torch.Generator, torch.Tensor]]
    state: Any = None
    passes: int = 0

    def again(self, name: str) -> Any:
        if self.state is None:
            raise DataError(f"a {name} whose nodes have no state cannot be read anew\n    try: data=lambda: {_ANEW}")
        for generator, state in self.generators:
            generator.set_state(state)
        self.passes = 0
        return deepcopy(self.state)


_begun: dict[int, _Begin] = {}  # by the id of nodes, as long as they are there: job.data may give the same each time


def _state_of(dataset: Any) -> Any:
    try:
        return dataset.get_state() if _is_node(dataset) else dataset.state_dict()
    except NotImplementedError:
        return None


def _generators_of(dataset: Any) -> list[tuple[torch.Generator, torch.Tensor]]:
    own = [getattr(getattr(node, "sampler", None), "generator", None) for node in _nodes(dataset)]
    return [(one, one.get_state()) for one in own if isinstance(one, torch.Generator)]


def _is_node(one: Any) -> bool:
    return all(hasattr(one, name) for name in ("__next__", "reset", "get_state"))


def _nodes(dataset: Any) -> list[Any]:
    pending, found = [getattr(dataset, "root", dataset)], list[Any]()
    while pending:
        node = pending.pop()
        if _is_node(node) and all(node is not one for one in found):
            found.append(node)
            sources = getattr(node, "source_nodes", {})
            pending += [getattr(node, "source", None), *(sources.values() if isinstance(sources, Mapping) else ())]
    return found
