"""The order of each epoch for a job with its own sampler, checked, and Phalanx's samplers."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from phalanx.config.batching import Sampler
from phalanx.config.fields import is_whole
from phalanx.config.job import Job
from phalanx.data.sampler import EpochSeeds, seeded
from phalanx.errors import Problem, SpecError

_KEPT = 2  # epochs: reading ahead is in the next one
_BEFORE_SAMPLES = -1  # the place in an epoch's seeds that no sample has
_POOL = 50  # batches that are sorted by length together


@dataclass(frozen=True, kw_only=True)
class EpochOrders:
    """The indices of each epoch from a sampler; ``size`` is that of the data, ``batch`` the global batch.

    An epoch's order is held whole: 8 bytes an index.

    Raises:
        SpecError: by ``length`` and by calling it, if the sampler gives an invalid order.
    """

    sampler: Sampler
    seed: int
    size: int
    batch: int
    _known: dict[int, np.ndarray] = field(default_factory=dict[int, np.ndarray], compare=False)

    @classmethod
    def of(cls, job: Job, size: int) -> EpochOrders | None:
        """Return the orders of ``job`` over ``size`` samples; ``None`` without a sampler of its own."""
        if job.sampler is None:
            return None
        return cls(sampler=Sampler.of(job.sampler), seed=job.seed, size=size, batch=job.batch)

    @property
    def length(self) -> int:
        """Return the samples in an epoch."""
        return len(self(0))

    @property
    def text(self) -> str:
        """Return a text that identifies this order, by its first epoch."""
        return _digest(self.sampler, self.seed, self.size, self.batch)

    def __call__(self, epoch: int) -> np.ndarray:
        """Return the indices of ``epoch`` in order, int64."""
        if (known := self._known.get(epoch)) is not None:
            return known
        order = self._checked(epoch)
        if epoch and len(order) != self.length:
            given = f"{len(order)} indices in epoch {epoch}, and {self.length} in epoch 0"
            raise self._problem(given, "as many in every epoch: steps are counted by it", "indices[:1000]")
        while len(self._known) >= _KEPT:
            del self._known[next(one for one in self._known if one)]  # epoch 0 says how many there are in each
        self._known[epoch] = order
        return order

    def _checked(self, epoch: int) -> np.ndarray:
        if self.sampler.size not in (None, self.size):
            given, allowed = f"a sampler for {self.sampler.size} samples", f"one for the {self.size} of the data"
            raise self._problem(given, allowed, "one weight or length for each sample")
        order = self._numbers_of_samples(epoch)
        where = f"in epoch {epoch}"
        if not len(order):
            raise self._problem(f"no index {where}", "1 or more", "range(len(dataset))")
        outside = (order < 0) | (order >= self.size)
        if outside.any():
            place = int(outside.argmax())
            given = f"index {order[place]} at place {place} {where}, with data of {self.size} samples"
            raise self._problem(given, f"0 to {self.size - 1}", f"np.arange({self.size})")
        if not self.sampler.repeats and len(twice := _twice(order)):
            index = int(twice[0])
            places = np.flatnonzero(order == index)[:2].tolist()
            given = f"index {index} at places {places[0]} and {places[1]} {where}"
            raise self._problem(given, "each index once, unless repeats=True", "px.Sampler(function, repeats=True)")
        return order

    def _numbers_of_samples(self, epoch: int) -> np.ndarray:
        with seeded(EpochSeeds.of(self.seed, epoch).seed(_BEFORE_SAMPLES)):
            try:
                given = self.sampler.indices(self.seed, epoch, self.batch)
            except Exception as error:
                error.add_note(f"while job.sampler gave the order of epoch {epoch}, with seed {self.seed}")
                raise
        try:
            order = np.asarray(given.detach().cpu() if isinstance(given, torch.Tensor) else given)
        except (TypeError, ValueError):
            order = np.asarray(None)
        if order.ndim == 1 and (order.dtype.kind in "iu" or not order.size):
            return order.astype(np.int64)
        what = f"a {type(given).__name__}"
        if order.ndim == 1:
            what += f" of {order.dtype}, first {order.flat[0].item()!r}"
        elif order.ndim:
            what += f" of shape {tuple(order.shape)}"
        allowed = "a list, array or one-dimensional tensor of whole numbers"
        raise self._problem(f"{what} in epoch {epoch}", allowed, "order.tolist()")

    @staticmethod
    def _problem(given: str, allowed: str, fix: str) -> SpecError:
        return SpecError([Problem(where="job.sampler", given=given, allowed=allowed, fix=fix)])


def _twice(order: np.ndarray) -> np.ndarray:
    ordered = np.sort(order)
    return ordered[1:][ordered[1:] == ordered[:-1]]


def order_digest(job: Job, size: int | None) -> str | None:
    """Return a text that identifies a job's sampler, by its first epoch; ``None`` without a sampler."""
    orders = None if size is None else EpochOrders.of(job, size)
    return None if orders is None else orders.text


@lru_cache(maxsize=32)  # every checkpoint has it, of each data set of a curriculum
def _digest(sampler: Sampler, seed: int, size: int, batch: int) -> str:
    order = EpochOrders(sampler=sampler, seed=seed, size=size, batch=batch)(0)
    return f"{len(order)} indices, {zlib.crc32(order.astype('<i8').tobytes()):08x}"


def weighted(
    weights: Sequence[float] | np.ndarray | torch.Tensor, samples: int | None = None, replacement: bool = True
) -> Sampler:
    """Return a sampler for ``Job(sampler=...)`` that draws samples in proportion to their weights.

    Args:
        weights: one a sample of the data, 0 or more.
        samples: drawn in an epoch; ``None``: the number of weights.
        replacement: whether a sample can be drawn again in the same epoch. Without it at most the number of weights
            above 0 can be drawn.

    Raises:
        SpecError: if weights or the number of samples are not such.
    """
    fix = "px.weighted([0.1, 0.9, 0.9])"
    chances = numbers_of_samples(weights, "px.weighted.weights", "finite numbers, 0 or more and one above it", fix)
    if not chances.sum() > 0:
        given, allowed = "weights that are all 0", "finite numbers, 0 or more and one above it"
        raise SpecError([Problem(where="px.weighted.weights", given=given, allowed=allowed, fix=fix)])
    most = int(np.count_nonzero(chances))
    count = len(chances) if samples is None else samples
    if not is_whole(count, 1) or (not replacement and count > most):
        given = f"{count!r} without replacement" if not replacement else repr(count)
        allowed = "a whole number, 1 or more" + ("" if replacement else f", at most the {most} with a weight above 0")
        fix = f"samples={most}" if not replacement else "samples=1000"
        raise SpecError([Problem(where="px.weighted.samples", given=given, allowed=allowed, fix=fix)])

    def order(seed: int, epoch: int) -> np.ndarray:
        generator = np.random.default_rng([seed, epoch])
        if replacement:
            ends = np.cumsum(chances)
            return np.searchsorted(ends, generator.random(count) * ends[-1], side="right")
        # Efraimidis and Spirakis 2006: the largest u ** (1 / weight), here by logarithms
        with np.errstate(divide="ignore"):
            waits = generator.exponential(size=len(chances)) / chances
        return np.argsort(waits, kind="stable")[:count]

    return Sampler(order, repeats=replacement, size=len(chances))


def buckets(lengths: Sequence[int] | np.ndarray | torch.Tensor) -> Sampler:
    """Return a sampler for ``Job(sampler=...)`` that batches samples of similar length, each once an epoch.

    Samples are shuffled by (seed, epoch), sorted by length within 50 batches at a time, and cut into batches of
    ``job.batch``, which are shuffled again. The partial last batch of an epoch holds samples of any length.

    Args:
        lengths: of each sample of the data: tokens, or another unit of padding.

    Raises:
        SpecError: if they are not numbers of 0 or more.
    """
    known = numbers_of_samples(
        lengths, "px.buckets.lengths", "numbers, 0 or more", "px.buckets([len(text) for text in texts])"
    )

    def order(seed: int, epoch: int, batch: int) -> np.ndarray:
        generator = np.random.default_rng([seed, epoch])
        shuffled = generator.permutation(len(known))
        whole = len(known) // batch * batch
        rows: list[np.ndarray] = []
        for start in range(0, whole, _POOL * batch):
            pool = shuffled[start : min(start + _POOL * batch, whole)]
            rows.append(pool[np.argsort(known[pool], kind="stable")].reshape(-1, batch))
        if not rows:
            return shuffled
        batches = np.concatenate(rows)
        return np.concatenate([batches[generator.permutation(len(batches))].ravel(), shuffled[whole:]])

    return Sampler(order, by_batch=True, size=len(known))


def numbers_of_samples(given: Any, where: str, allowed: str, fix: str) -> np.ndarray:
    """Return ``given``, a number of 0 or more for each sample, as float64.

    Raises:
        SpecError: if it is no such thing.
    """
    try:
        found = np.asarray(given.detach().cpu() if isinstance(given, torch.Tensor) else given, dtype=np.float64)
    except (TypeError, ValueError):
        found = np.asarray(np.nan)
    if found.ndim == 1 and len(found) and np.isfinite(found).all() and (found >= 0).all():
        return found
    what = f"a {type(given).__name__}" + (f" of shape {tuple(found.shape)}" if found.ndim else "")
    if found.ndim == 1 and len(found):
        bad = int(np.flatnonzero(~(np.isfinite(found) & (found >= 0)))[0])
        what = f"{found[bad]} at place {bad}"
    raise SpecError([Problem(where=where, given=what, allowed="one for each sample: " + allowed, fix=fix)])
