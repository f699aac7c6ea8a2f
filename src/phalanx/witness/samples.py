"""The samples of each step, and its random numbers, worked out from the rules in the documentation.

The rules are those of ``docs/explanation/global-batch.md`` ("Exactly, for another program"), in Python integers: no
code of the loader, the sampler or the step is called. It is slow (some microseconds a sample) and simple.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterable, Iterator
from copy import deepcopy
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, StackDataset, Subset, TensorDataset

_64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def splitmix64(state: int) -> int:
    """Return the finaliser of SplitMix64 (Steele, Lea, Flood 2014, figure 15)."""
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _64
    state = (state ^ state >> 27) * 0x94D049BB133111EB & _64
    return state ^ state >> 31


def stream_seed(*words: int) -> int:
    """Return the seed of forward's random numbers: words are the job's seed, step, micro-batch and part."""
    state = 0
    for word in words:
        state = splitmix64(state + _GOLDEN + word & _64)
    return state // 2


def sample_seed(seed: int, epoch: int, sample: int) -> int:
    """Return the seed of one sample's random numbers while it is read."""
    digest = hashlib.blake2b(f"({seed}, {epoch})".encode(), digest_size=8, person=b"phalanx.sample").digest()
    return splitmix64(int.from_bytes(digest, "little") + (sample + 1) * _GOLDEN & _64)


def seed_everything(seed: int) -> None:
    """Seed torch's, numpy's and Python's generators."""
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


class KeyedOrder:
    """The order of one epoch: position → sample number, a Feistel network over a rectangle with cycle walking."""

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        self._length = length
        self._rows = next(side for side in range(max(1, int((length - 1) ** 0.5)), length + 1) if side**2 >= length)
        self._columns = (length + self._rows - 1) // self._rows
        rounds = 24 if length < 1024 else 8
        digest = hashlib.shake_256(f"({seed}, {epoch})".encode()).digest(8 * rounds)
        self._keys = struct.unpack(f"<{rounds}Q", digest)
        self._narrow = length <= 2**24

    def __getitem__(self, position: int) -> int:
        sample = self._once(position)
        while sample >= self._length:
            sample = self._once(sample)
        return sample

    def _once(self, number: int) -> int:
        row, column = divmod(number, self._columns)
        for first, second in zip(self._keys[::2], self._keys[1::2], strict=True):
            row = (row + self._mixed(column, first, self._rows)) % self._rows
            column = (column + self._mixed(row, second, self._columns)) % self._columns
        return row * self._columns + column

    def _mixed(self, word: int, key: int, below: int) -> int:
        if self._narrow:  # words of 32 bits
            word = (word ^ key % 2**32) * 0x7FEB352D % 2**32
            return ((word ^ word >> 15) * 0x846CA68B % 2**32 >> 12) * below >> 20
        word = (word ^ key) * 0xBF58476D1CE4E5B9 % 2**64
        return ((word ^ word >> 29) * 0x94D049BB133111EB % 2**64 >> 32) * below >> 32


class GlobalBatches(Sampler[list[int]]):
    """The ``batch_sampler`` for a ``DataLoader``: the sample numbers of each step of one epoch."""

    def __init__(self, length: int, batch: int, order: KeyedOrder | list[int] | None, drop_last: bool) -> None:
        self._length, self._batch, self._order, self._drop_last = length, batch, order, drop_last

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, self._length, self._batch):
            positions = range(start, min(start + self._batch, self._length))
            if len(positions) == self._batch or not self._drop_last:
                yield [position if self._order is None else self._order[position] for position in positions]


class Seeded(Dataset[Any]):
    """The user's data, read as ``DataLoader`` reads it, with the generators seeded by the rule for samples."""

    def __init__(self, data: Any, seed: int, epoch: int, *, own_collate: bool) -> None:
        self._data, self._seed, self._epoch = data, seed, epoch
        while type(data) is Subset:  # which has the method of what it wraps, whether that has it or not
            data = data.dataset
        draws_nothing = _kind(data) == ("phalanx", "Table") or type(data) in (TensorDataset, list, tuple, range)
        self._draws, self._own_collate = not draws_nothing, own_collate
        self._at_once = type(data) is not StackDataset and callable(getattr(data, "__getitems__", None))

    def __len__(self) -> int:
        return len(self._data)

    def __getitems__(self, samples: list[int]) -> list[Any]:
        """Return the samples of a batch, or a batch from data that read many at once."""
        if self._own_collate or (self._at_once and self._draws):
            self.plant(samples[0])
        if _kind(self._data)[0] == "phalanx" and hasattr(self._data, "seeded"):  # it draws for several at a time
            self._data.seeded(self)
        if self._at_once and self._draws:
            found = self._data.__getitems__(samples)
            if isinstance(found, list) or not self._own_collate:
                return found
        return [self._read(sample) for sample in samples]

    def _read(self, sample: int) -> Any:
        if self._draws:
            self.plant(sample)
        return self._data[sample]

    def plant(self, sample: int) -> None:
        """Seed the generators as for this sample."""
        seed_everything(sample_seed(self._seed, self._epoch, sample))


def is_stream(data: Any) -> bool:
    """Return True if the data can only be read in order."""
    return isinstance(data, IterableDataset) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__"))


def epochs_of(data: Any, job: Any) -> Iterator[tuple[int, Iterator[tuple[list[int], Any]]]]:
    """Yield each epoch's number and the (sample numbers, batch) of its steps, without end."""
    if changes(data, job):
        for epoch, batches in _changing_epochs(data, job):
            yield epoch, _transformed(job, epoch, loaded(data, job, epoch, batches))
    nodes = hasattr(getattr(data, "root", None), "get_state")  # a Loader of torchdata goes from pass to pass
    other = nodes or any(hasattr(data, name) for name in ("set_epoch", "seek"))
    keeps = is_stream(data) and hasattr(data, "load_state_dict") and not other
    start = deepcopy(data.state_dict()) if keeps else None
    for epoch in count():
        if keeps:
            data.load_state_dict(deepcopy(start))
        of_pass = () if is_stream(data) else _global_batches(data, job, epoch)
        steps = _streamed(data, job, epoch) if is_stream(data) else loaded(data, job, epoch, of_pass)
        yield epoch, _transformed(job, epoch, steps)


def numbers(data: Any, job: Any, steps: int) -> list[list[int]]:
    """Return the sample numbers of each of the first steps, for data that can be read in any order."""
    found: list[list[int]] = []
    plain = ((epoch, _global_batches(data, job, epoch)) for epoch in count())
    epochs = _changing_epochs(data, job) if changes(data, job) else plain
    while len(found) < steps:
        found += list(next(epochs)[1])
    return found[:steps]


def steps_of_epochs(data: Any, job: Any, epochs: int) -> int:
    """Return the steps in so many passes over data that can be read in any order."""
    if changes(data, job):
        return sum(len(batches) for _, batches in islice(_changing_epochs(data, job), epochs))
    length = len(data) if job.sampler is None else len(_own_order(job, 0))
    return epochs * (len(range(0, length, job.batch)) - bool(job.drop_last and length % job.batch))


def changes(data: Any, job: Any) -> bool:
    """Return True if batch or data change with the step."""
    return job.batch_ramp is not None or job.batch_tokens is not None or _kind(data) == ("phalanx", "Curriculum")


def _kind(data: Any) -> tuple[str, str]:
    """Recognise Phalanx's public modules by name, because they are judged, too."""
    return type(data).__module__.partition(".")[0], type(data).__name__


def _changing_epochs(data: Any, job: Any) -> Iterator[tuple[int, list[list[int]]]]:
    sources = data.sources if _kind(data) == ("phalanx", "Curriculum") else {0: data}
    ramp = job.batch_ramp or {0: job.batch}
    step, epoch, own, before = 0, 0, 0, None
    while True:
        first = max(one for one in sources if one <= step)
        own, before = own + 1 if first == before else 0, first
        begin = sum(len(source) for one, source in sources.items() if one < first)
        order = _order_of_pass(sources[first], job, own)
        batches = [] if job.batch_tokens is None else list(_of_tokens(order, job))
        order, step = ([], step + len(batches)) if batches else (order, step)
        while order and max(one for one in sources if one <= step) == first:
            size = ramp[max(one for one in ramp if one <= step)]
            taken, order = order[:size], order[size:]
            if len(taken) < size and job.drop_last:
                break
            batches.append([begin + place for place in taken])
            step += 1
        if batches:
            yield epoch, batches
            epoch += 1


def _of_tokens(order: list[int], job: Any) -> Iterator[list[int]]:
    taken, tokens = list[int](), 0
    for place in order:
        taken, tokens = [*taken, place], tokens + int(job.batch_tokens.lengths[place])
        if tokens >= job.batch_tokens.tokens or len(taken) == job.batch:
            yield taken
            taken, tokens = [], 0
    if taken:
        yield taken


def _order_of_pass(source: Any, job: Any, own: int) -> list[int]:
    if _kind(source)[0] == "phalanx" and getattr(source, "sampler", None):
        return [int(place) for place in source.sampler.function(job.seed, own)]
    if job.sampler is not None:
        return _own_order(job, own)
    keyed = KeyedOrder(len(source), job.seed, own)
    return [place if job.shuffle is False else keyed[place] for place in range(len(source))]


def _global_batches(data: Any, job: Any, epoch: int) -> GlobalBatches:
    if job.sampler is None:
        order = None if job.shuffle is False else KeyedOrder(len(data), job.seed, epoch)
        return GlobalBatches(len(data), job.batch, order, job.drop_last)
    own = _own_order(job, epoch)
    return GlobalBatches(len(own), job.batch, own, job.drop_last)


def _own_order(job: Any, epoch: int) -> list[int]:
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed_everything(sample_seed(job.seed, epoch, -1))
    function = getattr(job.sampler, "function", job.sampler)
    given = function(job.seed, epoch, *([job.batch] if getattr(job.sampler, "by_batch", False) else []))
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])
    return [int(index) for index in given]


def in_order(data: Any, job: Any) -> Iterator[tuple[list[int], Any]]:
    """Yield each sample once, in order, as an evaluation reads them."""
    return loaded(data, job, 0, GlobalBatches(len(data), job.batch, None, drop_last=False))


def loaded(data: Any, job: Any, epoch: int, batches: Iterable[list[int]]) -> Iterator[tuple[list[int], Any]]:
    """Read these batches: sample numbers and batch of each."""
    seeded, collate = Seeded(data, job.seed, epoch, own_collate=job.collate is not None), _collate(job)
    return zip(batches, DataLoader(seeded, batch_sampler=batches, collate_fn=collate), strict=True)


def _collate(job: Any) -> Any:
    join = job.collate or torch.utils.data.default_collate
    return lambda found: join(found) if isinstance(found, list) else found


def _transformed(job: Any, epoch: int, steps: Iterable[tuple[list[int], Any]]) -> Iterator[tuple[list[int], Any]]:
    for ids, batch in steps:
        if job.transform is not None:
            seed_everything(sample_seed(job.seed, epoch, ids[0]))
        yield ids, batch if job.transform is None else job.transform(batch, torch.tensor(ids))


def _streamed(data: Any, job: Any, epoch: int) -> Iterator[tuple[list[int], Any]]:
    if hasattr(data, "set_epoch"):
        data.set_epoch(epoch)
    if hasattr(data, "seek"):
        data.seek(0)
    position = 0
    seed_everything(sample_seed(job.seed, epoch, position))
    if hasattr(data, "get_state") and hasattr(data, "reset"):  # a node of torchdata, which may read ahead from here on
        data.reset()
    stream = iter(data)
    while samples := list(islice(stream, job.batch)):
        if len(samples) == job.batch or not job.drop_last:
            if job.collate is not None:
                seed_everything(sample_seed(job.seed, epoch, position))
            yield list(range(position, position + len(samples))), _collate(job)(samples)
        position += len(samples)
        seed_everything(sample_seed(job.seed, epoch, position))
