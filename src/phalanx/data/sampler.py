"""The samples of each optimizer step and their seeds: pure functions of the step, the seed and the sample.

A shuffled list of sample numbers costs memory and time in proportion to the data, and resuming costs it again. A keyed
permutation, a *function* position → sample number, costs neither, and any part of it is computed by itself.

It is a Feistel network over a rectangle (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, section 5):
a number below ``rows * columns`` is a pair (row, column); each round adds a keyed hash of one to the other, modulo its
range, which can be undone and so is a permutation of the rectangle. The rectangle is the tightest one around
``length``; a number that lands outside 0..length-1 is sent through again until it lands inside ("cycle walking",
section 4 there), which happens to at most one in about ``sqrt(length)``.

Augmentations draw from Python's ``random``, numpy's legacy global generator and torch's CPU generator. All three are
seeded before each sample (or, for datasets that fetch many at once, before each micro-batch; for streams, before each
global batch). So a sample is augmented alike on any number of ranks and loader processes, and after a resume.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from phalanx.errors import Problem, SpecError
from phalanx.placement.batch_split import Cuts

BLOCK = 8192
"""Ids that ``walk`` computes at once: a pause of 0.2 ms, and a few ns an id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalBatchSampler:
    """The sample ids of every global batch of a run over map-style data with so many samples.

    Each epoch is a permutation of all samples, keyed by (seed, epoch), or 0..length-1 without ``shuffle``, cut into
    global batches in order; ``drop_last`` leaves a partial one out. Any step is computed by itself, in memory and time
    independent of the data's length and of the step. ``orders`` gives the ``length`` ids of an epoch instead.

    Raises:
        SpecError: if there is no sample, or if ``drop_last`` would drop all of them.
    """

    length: int
    batch: int
    seed: int
    shuffle: bool = True
    drop_last: bool = False
    orders: Callable[[int], np.ndarray] | None = None

    def __post_init__(self) -> None:
        if problems := size_problems(self.length, self.batch, self.drop_last):
            raise SpecError(problems)

    @property
    def steps_per_epoch(self) -> int:
        """Return the optimizer steps in a pass over the data."""
        return self.length // self.batch if self.drop_last else -(-self.length // self.batch)

    def steps_of(self, epochs: int) -> int:
        """Return the optimizer steps in so many passes over the data."""
        return epochs * self.steps_per_epoch

    def epoch_of(self, step: int) -> int:
        """Return the epoch, 0-based, of optimizer step ``step``."""
        return step // self.steps_per_epoch

    def samples(self, step: int) -> int:
        """Return the samples in the global batch of ``step``; the last in an epoch may be smaller."""
        return min(self.batch, self.length - step % self.steps_per_epoch * self.batch)

    def ids(self, step: int) -> np.ndarray:
        """Return the sample ids, int64, of the whole global batch of step ``step`` (0-based over the run)."""
        return next(self.walk(step, step + 1))[2]

    def walk(self, first: int, stop: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield ``(step, epoch, ids)`` of steps first..stop-1, computed some thousand ids at a time."""
        step = first
        while step < stop:
            epoch, index = divmod(step, self.steps_per_epoch)
            last = min(stop - step, self.steps_per_epoch - index) + index
            order = self._order(epoch)
            at_once = max(1, BLOCK // self.batch)
            for begin in range(index, last, at_once):
                end = min(begin + at_once, last)
                ids = np.arange(begin * self.batch, min(end * self.batch, self.length), dtype=np.int64)
                if order is not None:
                    ids = order(ids)
                for offset in range(end - begin):
                    yield step, epoch, ids[offset * self.batch : (offset + 1) * self.batch]
                    step += 1

    def walk_held(
        self, first: int, stop: int, cuts: Callable[[int, int], Cuts]
    ) -> Iterator[tuple[int, int, HeldIds, Cuts]]:
        """Yield ``(step, epoch, ids, cuts)`` of steps first..stop-1, with this process's part of the ids.

        ``cuts(step, samples)`` gives the part. Other ids are not computed, so that the time is that of the process's
        share.
        """
        known, order = -1, None
        for step in range(first, stop):
            epoch, index = divmod(step, self.steps_per_epoch)
            if epoch != known:
                known, order = epoch, self._order(epoch)
            samples = self.samples(step)
            held = cuts(step, samples)
            ranges = [one for part in held for one in part if one[1]]
            low, high = min((a for a, _ in ranges), default=0), max((b for _, b in ranges), default=0)
            places = np.concatenate([[0], np.arange(low, high, dtype=np.int64)]) + index * self.batch
            ids = places if order is None else order(places)
            yield step, epoch, HeldIds(samples=samples, low=low, first=ids[:1], own=ids[1:]), held

    def _order(self, epoch: int) -> Callable[[np.ndarray], np.ndarray] | None:
        if self.orders is not None:
            return self.orders(epoch).__getitem__
        return Permutation.keyed(self.length, self.seed, epoch) if self.shuffle else None


def each_step(self: Any, first: int, stop: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield ``(step, epoch, ids)`` of steps first..stop-1, for a sampler that gives the ids of one step."""
    for step in range(first, stop):
        yield step, self.epoch_of(step), self.ids(step)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldIds:
    """Ids of a global batch of ``samples``; only ``first`` and ``own``, from ``low`` on, are known."""

    samples: int
    low: int
    first: np.ndarray
    own: np.ndarray

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, places: slice) -> np.ndarray:
        start, stop, _ = places.indices(self.samples)
        return self.first if (start, stop) == (0, 1) else self.own[start - self.low : stop - self.low]


def size_problems(length: int, batch: int = 0, drop_last: bool = False, since: str = "") -> list[Problem]:
    """Return the problems of ``length`` samples in batches of ``batch``."""
    if not 1 <= length <= LARGEST:
        given, fix = f"data of {length} samples", "data=lambda: dataset    # with len(dataset) >= 1"
        return [Problem(where="job.data", given=given, allowed="1 sample or more", fix=fix)]
    if not drop_last or length >= batch:
        return []
    given = f"drop_last=True with {length} samples and a batch of {batch}{since}: nothing would be left"
    allowed = "a batch no larger than the data, or drop_last=False"
    return [Problem(where="job.drop_last", given=given, allowed=allowed, fix=f"batch={length}")]


LARGEST = 2**62  # rows and columns then stay below 2**32, which the scaling of a hash needs
_SMALL = 1024
_ROUNDS = 8
_ROUNDS_SMALL = 24  # a small rectangle mixes less a round


@dataclass(frozen=True, slots=True)
class _Words:
    """Unsigned words of one size and their hash: multiply, fold, multiply, keep the high bits.

    Attributes:
        first, second: odd multipliers before and after folding.
        fold: bits shifted by in folding.
        low: low bits thrown away.
        high: bits kept; a side of the rectangle is at most 2**(all bits - high).
    """

    dtype: Any
    first: Any
    second: Any
    fold: Any
    low: Any
    high: Any


# Multipliers of splitmix64's finaliser and of Wellons' lowbias32. 32-bit words are three times as fast.
_WORDS_64 = _Words(np.uint64, *map(np.uint64, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 29, 32, 32)))
_WORDS_32 = _Words(np.uint32, *map(np.uint32, (0x7FEB352D, 0x846CA68B, 15, 12, 20)))
_LARGEST_32 = 2**24


@dataclass(frozen=True, slots=True)
class Permutation:
    """A pseudo-random permutation of 0..length-1, fixed by its keys, one a round. Make one with ``Permutation.keyed``.

    ``rows`` and ``columns`` are the sides of the rectangle: ``rows * columns >= length``.
    """

    length: int
    rows: Any
    columns: Any
    keys: tuple[Any, ...]
    words: _Words

    @classmethod
    def keyed(cls, length: int, *key: int) -> Permutation:
        """Return the permutation of 0..length-1 for ``key``, the same on every machine.

        Raises:
            ValueError: if ``length`` is not within 1 and 2**62.
        """
        if not 1 <= length <= LARGEST:
            raise ValueError(f"a permutation needs a length from 1 to 2**62, not {length}")
        words = _WORDS_32 if length <= _LARGEST_32 else _WORDS_64
        rows = math.isqrt(length - 1) + 1
        columns = -(-length // rows)
        rounds = _ROUNDS_SMALL if length < _SMALL else _ROUNDS
        digest = hashlib.shake_256(repr(key).encode()).digest(8 * rounds)
        keys = np.frombuffer(digest, dtype="<u8").astype(words.dtype)
        return cls(length, words.dtype(rows), words.dtype(columns), tuple(keys), words)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the numbers at ``positions`` (one-dimensional, each within 0..length-1), as int64."""
        numbers = self._through(positions.astype(self.words.dtype))
        outside = numbers >= self.length
        while outside.any():
            numbers[outside] = self._through(numbers[outside])
            outside = numbers >= self.length
        return numbers.astype(np.int64)

    def _through(self, numbers: np.ndarray) -> np.ndarray:
        row = numbers // self.columns
        column = numbers - row * self.columns
        for index in range(0, len(self.keys), 2):
            self._add_hash(row, column, self.keys[index], self.rows)
            self._add_hash(column, row, self.keys[index + 1], self.columns)
        return row * self.columns + column

    def _add_hash(self, side: np.ndarray, other: np.ndarray, key: Any, below: Any) -> None:
        """Add a hash of ``other``, scaled to 0..below-1, to ``side`` in place, modulo ``below``."""
        words = self.words
        mixed = (other ^ key) * words.first
        mixed ^= mixed >> words.fold
        mixed *= words.second
        mixed >>= words.low
        mixed *= below
        mixed >>= words.high
        side += mixed
        # side is below twice the modulus, and where it is below the modulus the difference wraps to a huge number.
        np.minimum(side, side - below, out=side)


_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class EpochSeeds:
    """The seeds of all samples in one epoch; ``base`` is a 64-bit hash of (seed, epoch)."""

    epoch: int
    base: int

    @classmethod
    def of(cls, seed: int, epoch: int) -> EpochSeeds:
        digest = hashlib.blake2b(repr((seed, epoch)).encode(), digest_size=8, person=b"phalanx.sample").digest()
        return cls(epoch, int.from_bytes(digest, "little"))

    def seed(self, sample: int) -> int:
        """Return the 64-bit seed of ``sample`` (splitmix64)."""
        mixed = (self.base + (sample + 1) * 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return mixed ^ (mixed >> 31)

    def plant(self, sample: int) -> None:
        """Seed Python's, numpy's and torch's CPU stream for ``sample``."""
        plant(self.seed(sample))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator, numpy's and Python's for the block, and restore them afterwards."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    plant(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


def plant(seed: int) -> None:
    """Seed torch's CPU generator, numpy's and Python's with ``seed``; about 10 µs."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
