"""Map-style data, readable at any index: from sample ids to a batch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, StackDataset, Subset, TensorDataset, default_collate

from phalanx.data.changing_batches import ChangingBatchSampler
from phalanx.data.curriculum import Curriculum
from phalanx.data.dataset_facts import DrawsTogether, draws
from phalanx.data.sampler import BLOCK, EpochSeeds, GlobalBatchSampler, HeldIds
from phalanx.data.step_batch import BatchSplitter, StepBatch, step_batch, transformed
from phalanx.data.table import Table
from phalanx.data.token_batches import TokenBatchSampler
from phalanx.errors import DataError, Problem, SpecError
from phalanx.placement.batch_split import Cuts

AnySampler = GlobalBatchSampler | ChangingBatchSampler | TokenBatchSampler
"""Which samples each step of a run over map-style data has."""


def is_stream(dataset: Any, where: str = "job.data") -> bool:
    """Return True if the dataset, the value of ``where``, can only be read in order.

    Raises:
        SpecError: if it is neither a stream nor map-style.
    """
    name = where.removeprefix("job.")
    if isinstance(dataset, DataLoader) or (hasattr(dataset, "batch_sampler") and hasattr(dataset, "dataset")):
        given = f"a {type(dataset).__name__}, which makes batches of its own"
        allowed = "the dataset that it reads: ranks are given their shares of global batches of job.batch"
        fix = f"{name}=lambda: dataset, and batch, collate, workers of the job"
        raise SpecError([Problem(where=where, given=given, allowed=allowed, fix=fix)])
    if isinstance(dataset, IterableDataset):
        return True
    if columns := _columns(dataset):
        given, fix = columns[0], f"{name}=lambda: {columns[1]}"
        allowed = "a dataset, whose [i] is a sample and whose len() is how many there are, or a stream of samples"
        raise SpecError([Problem(where=where, given=given, allowed=allowed, fix=fix)])
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return False
    if hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__"):
        return True
    given, allowed = f"a {type(dataset).__name__}", "map-style data (__getitem__ and __len__), or a stream (__iter__)"
    fix = f"{name}=lambda: phalanx.data.Table(image=images, label=labels)"
    raise SpecError([Problem(where=where, given=given, allowed=allowed, fix=fix)])


def _columns(data: Any) -> tuple[str, str] | None:
    kind = f"a {type(data).__name__}"
    if isinstance(data, str | bytes):
        return f"{kind}, {data[:60]!r}", "MyDataset(path), or px.Table(**columns)"
    if isinstance(data, Mapping) and 0 not in data:
        names = ", ".join(str(name) for name in list(data)[:8])
        if any(hasattr(value, "column_names") for value in data.values()):
            return f"{kind} of {names}", f"splits[{next(iter(data))!r}]"
        return f"{kind} of {names}", "px.Table(**columns)"
    if type(data).__name__ == "DataFrame":
        fix = "px.Table(**{name: frame[name].to_numpy() for name in frame})"
        return f"{kind}, whose [i] is a column", fix
    if type(data) is tuple and len(data) > 1 and all(getattr(one, "ndim", 0) for one in data):
        lengths = {len(one) for one in data}
        if len(lengths) == 1 and len(data) not in lengths:
            given = f"a tuple of {len(data)} arrays of {lengths.pop()} rows each"
            return given, "px.Table(input=inputs, label=labels)"
    return None


@final
class Fetcher:
    """A reader: ``fetch(epoch, ids)`` gives the collated batch of these samples.

    A dataset with ``__getitems__`` is asked for all ids at once. An answer that is not a list of samples is used as the
    batch. Otherwise samples are read one at a time, each with its own random streams. A batch that is a mapping of any
    type (``transformers``' ``BatchEncoding``, say) becomes a ``dict``.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any] | None,
        seed: int,
        transform: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        self._dataset, self.transform = dataset, transform
        self._collate = plain(collate) if collate else default_collate
        self._own_collate = collate is not None
        self._seed = seed
        self._seeds = EpochSeeds.of(seed, 0)
        self._at_once = takes_many(dataset)
        self._draws = draws(dataset)
        self._table = dataset if type(dataset) is Table and collate is None else None
        self._tensors = dataset if type(dataset) is TensorDataset and collate is None else None

    @property
    def parts(self) -> list[range]:
        """Return the places of each source of a ``px.Curriculum``; empty for other data."""
        return list(self._dataset.places().values()) if isinstance(self._dataset, Curriculum) else []

    def fetch(self, epoch: int, ids: np.ndarray) -> Any:
        """Return the transformed batch of the samples ``ids`` (int64, at least one) in ``epoch``."""
        batch = self._fetched(epoch, ids)
        seeds = EpochSeeds.of(self._seed, epoch)
        return batch if self.transform is None else transformed(self.transform, seeds.plant, batch, ids)

    def _fetched(self, epoch: int, ids: np.ndarray) -> Any:
        if self._table is not None:
            return self._table.__getitems__(ids)
        if self._tensors is not None:  # what collating single rows gives, many times faster
            return [tensor[torch.from_numpy(ids)] for tensor in self._tensors.tensors]
        if epoch != self._seeds.epoch:
            self._seeds = EpochSeeds.of(self._seed, epoch)
        wanted: list[int] = ids.tolist()
        if self._own_collate or (self._at_once and self._draws):
            self._seeds.plant(wanted[0])
            dataset = self._dataset
            if isinstance(dataset, DrawsTogether):
                dataset.seeded(self._seeds)
        if self._at_once:
            got = self._dataset.__getitems__(wanted)
            if isinstance(got, list):
                return self._collated(wanted, got)
            if not self._own_collate:
                return _as_dict(got)
        return self._collated(wanted, self._one_by_one(wanted))

    def _collated(self, wanted: list[int], samples: list[Any]) -> Any:
        try:
            return self._collate(samples)
        except Exception as error:
            none = next((number for number, one in zip(wanted, samples, strict=False) if one is None), None)
            if none is None:
                raise
            fix = "a collate= that leaves it out, or its index out of the sampler"
            raise DataError(f"job.data: sample {none} is None, which cannot be collated\n    try: {fix}") from error

    def _one_by_one(self, wanted: list[int]) -> list[Any]:
        dataset, draws, plant = self._dataset, self._draws, self._seeds.plant
        samples: list[Any] = []
        for sample in wanted:
            if draws:
                plant(sample)
            try:
                samples.append(dataset[sample])
            except Exception as error:
                error.add_note(f"while reading sample {sample} of the data")
                raise
        return samples


def plain(collate: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Return ``collate`` with batches that are mappings turned into dicts."""
    return lambda samples: _as_dict(collate(samples))


def _as_dict(batch: Any) -> Any:
    return dict(batch) if isinstance(batch, Mapping) and type(batch) is not dict else batch


def _elements(batch: Any) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))


def takes_many(dataset: Any) -> bool:
    """Return True if the dataset itself, and not only torch's wrapper, fetches many samples at once.

    ``Subset`` offers ``__getitems__`` for any data; samples would then share one random stream, and draws would depend
    on the micro-batch.
    """
    if type(dataset) is Subset:
        return takes_many(dataset.dataset)
    if type(dataset) is StackDataset:
        return False
    return callable(getattr(dataset, "__getitems__", None))


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexedReader:
    """A reader of this process's share of optimizer steps first..stop-1, as cut by ``splitter``.

    ``size``: samples in the data.
    """

    fetcher: Fetcher
    sampler: AnySampler
    splitter: BatchSplitter
    first: int
    stop: int
    size: int

    def example(self, count: int) -> Any:
        """Return the first ``count`` samples, collated; for a curriculum, of its part with the largest samples."""
        places = self._largest()
        return self.collated(places[: min(count, len(places))])

    def spread(self, count: int) -> list[int]:
        """Return up to ``count`` places spread over the data, or over the part with the largest samples."""
        within = self._largest()
        return sorted({int(place) for place in np.linspace(within.start, within.stop - 1, min(count, len(within)))})

    def looked_at(self) -> str:
        """Return a note on the part of a curriculum used by ``example`` and ``spread``; else ""."""
        if not isinstance(self.sampler, ChangingBatchSampler) or not self.fetcher.parts:
            return ""
        first = min(one.first for one in self.sampler.stretches if one.begin == self._largest().start)
        return (
            f"Of the data, px.Curriculum: memory and time are those of its samples from step {first} on, the largest."
        )

    def _largest(self) -> range:
        """Return the dataset part whose first sample has the most elements: the part traced and priced."""
        parts = self.fetcher.parts or [range(self.size)]
        return parts[0] if len(parts) == 1 else max(parts, key=lambda part: _elements(self.collated(part[:1])))

    def collated(self, places: Sequence[int]) -> Any:
        """Return the samples at these places of the data, collated."""
        return self.fetcher.fetch(0, np.asarray(places, dtype=np.int64))

    def steps(self, load: Callable[[int, np.ndarray], Any]) -> Generator[StepBatch, None, None]:
        """Yield the steps; ``load(epoch, ids)`` gives each micro-batch."""
        for step, epoch, ids, cuts in self._walk():
            yield step_batch(step, epoch, ids, cuts, load, whole=self.fetcher.transform is not None)

    def requests(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the arguments that ``steps`` will pass to ``load``, in order, to read ahead."""
        for _, epoch, ids, cuts in self._walk():
            pieces = [(0, len(ids))] if self.fetcher.transform else [piece for part in cuts for piece in part]
            yield from ((epoch, ids[start : stop or 1]) for start, stop in pieces)

    def _walk(self) -> Iterator[tuple[int, int, np.ndarray | HeldIds, Cuts]]:
        sampler = self.sampler
        if isinstance(sampler, GlobalBatchSampler) and sampler.batch > BLOCK and not self.fetcher.transform:
            yield from sampler.walk_held(self.first, self.stop, self.splitter.cuts)
            return
        for step, epoch, ids in sampler.walk(self.first, self.stop):
            yield step, epoch, ids, self.splitter.cuts(step, len(ids))
