"""The samples of each optimizer step if batches are filled up to a number of tokens.

An epoch is a permutation keyed by (seed, epoch), or a sampler's order, cut as soon as the lengths since the last cut
reach the number of tokens. Cuts are found an epoch at a time, in about 0.2 µs a sample; the lengths, and the orders of
two epochs, stay in memory: 24 bytes a sample. A step of a later epoch needs the number of steps of each epoch before
it, which is counted once.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple, final

import numpy as np

from phalanx.config.batching import TokenBatch
from phalanx.config.job import Job
from phalanx.data.own_orders import EpochOrders, numbers_of_samples
from phalanx.data.sampler import Permutation, each_step, size_problems
from phalanx.errors import SpecError

_KEPT = 2  # epochs: reading ahead is in the next one
_FIX = "px.TokenBatch(8192, [len(text) for text in texts])"


class _Epoch(NamedTuple):
    """The ids of an epoch in order, and the end of each step, both int64."""

    ids: np.ndarray
    ends: np.ndarray

    def step(self, index: int) -> np.ndarray:
        return self.ids[self.ends[index - 1] if index else 0 : self.ends[index]]


@final
class TokenBatchSampler:
    """The sample ids of every global batch of a run with batches filled up to a number of tokens.

    Attributes:
        length: samples in an epoch.
        tokens: fewest tokens of a step.
        batch: most samples of a step, for any number of tokens.
    """

    steps_per_epoch = None  # epochs may have unlike numbers of steps

    def __init__(self, job: Job, size: int) -> None:
        """Plan the steps of ``job``, which has ``batch_tokens``, over data of ``size`` samples.

        Raises:
            SpecError: if there is not one length, a whole number of 0 or more, for each sample, or no sample.
        """
        assert job.batch_tokens is not None
        self.tokens, self.batch = job.batch_tokens.tokens, job.batch
        self._lengths = lengths_of(job.batch_tokens, size)
        self._orders = EpochOrders.of(job, size)
        self._seed, self._shuffle = job.seed, job.shuffle is not False
        self.length = size if self._orders is None else self._orders.length
        self._firsts = [0]  # the first step of each epoch that was counted, and of the next
        self._known: dict[int, _Epoch] = {}

    def epoch_of(self, step: int) -> int:
        """Return the epoch, 0-based, of optimizer step ``step``."""
        while self._firsts[-1] <= step:
            epoch = len(self._firsts) - 1
            self._firsts.append(self._firsts[-1] + len(self._epoch(epoch).ends))
        return int(np.searchsorted(self._firsts, step, side="right")) - 1

    def samples(self, step: int) -> int:
        """Return the samples in the global batch of ``step``."""
        return len(self.ids(step))

    def ids(self, step: int) -> np.ndarray:
        """Return the sample ids, int64, of the whole global batch of step ``step`` (0-based over the run)."""
        epoch = self.epoch_of(step)
        return self._epoch(epoch).step(step - self._firsts[epoch])

    walk = each_step

    def steps_of(self, epochs: int) -> int:
        """Return the optimizer steps in so many passes over the data."""
        while len(self._firsts) <= epochs:
            self.epoch_of(self._firsts[-1])
        return self._firsts[epochs]

    def remarks(self) -> list[str]:
        """Return a sentence for each reason why steps of the first epoch have fewer tokens."""
        ids, ends = self._epoch(0)
        each = np.diff(ends, prepend=0)
        tokens = np.add.reduceat(self._lengths[ids], ends - each)
        short = tokens[:-1] < self.tokens  # the last has the rest
        found: list[str] = []
        if short.any():
            found.append(
                f"{int(short.sum())} of the {len(ends)} steps of the first epoch end with {self.batch} samples, the "
                f"most by batch={self.batch}, before these have the {self.tokens} tokens of batch_tokens: a larger "
                f"batch allows more."
            )
        elif len(ends) == 1 and tokens[0] < self.tokens:
            found.append(
                f"batch_tokens of {self.tokens} are more than there are: each step has all {self.length} samples of an "
                f"epoch, {int(tokens[0])} tokens."
            )
        return found

    def _epoch(self, epoch: int) -> _Epoch:
        if (known := self._known.get(epoch)) is not None:
            return known
        ids = self._order(epoch)
        while len(self._known) >= _KEPT:
            del self._known[min(self._known)]
        return self._known.setdefault(epoch, _Epoch(ids, self._ends(self._lengths[ids])))

    def _order(self, epoch: int) -> np.ndarray:
        if self._orders is not None:
            return self._orders(epoch)
        ids = np.arange(self.length, dtype=np.int64)
        return Permutation.keyed(self.length, self._seed, epoch)(ids) if self._shuffle else ids

    def _ends(self, lengths: np.ndarray) -> np.ndarray:
        total = np.cumsum(lengths)
        ends, begin, taken = list[int](), 0, 0
        while begin < len(total):
            enough = int(np.searchsorted(total, taken + self.tokens)) + 1
            begin = min(enough, begin + self.batch, len(total))
            taken = int(total[begin - 1])
            ends.append(begin)
        return np.asarray(ends, dtype=np.int64)


def lengths_of(given: TokenBatch, size: int) -> np.ndarray:
    """Return the lengths of the ``size`` samples of the data, int64.

    Raises:
        SpecError: if there is not one, a whole number of 0 or more, for each; or no sample, or too many.
    """
    if problems := size_problems(size):
        raise SpecError(problems)
    where = "px.TokenBatch.lengths"
    found = numbers_of_samples(given.lengths, where, "whole numbers, 0 or more", _FIX)
    if (parts := found != np.floor(found)).any():
        place = int(parts.argmax())
        raise SpecError.of(where, f"{found[place]} at place {place}", "whole numbers, 0 or more", _FIX)
    if len(found) != size:
        raise SpecError.of(where, f"{len(found)} lengths", f"one for each of the {size} samples of the data", _FIX)
    return found.astype(np.int64)


def lengths_digest(job: Job, size: int | None) -> str:
    """Return a text that identifies the lengths of a job's samples; empty without lengths."""
    if job.batch_tokens is None or size is None:
        return ""
    return f"lengths {zlib.crc32(lengths_of(job.batch_tokens, size).astype('<i8').tobytes()):08x}"


def beside_token_batches(dataset: Any) -> SpecError:
    """Return the error for ``batch_tokens`` with a stream or with data that change with the step."""
    given = f"batch_tokens with a {type(dataset).__name__}"
    allowed = "map-style data (__getitem__ and __len__), with the length of each sample known before the run"
    return SpecError.of("job.batch_tokens", given, allowed, "batch_tokens=None")
