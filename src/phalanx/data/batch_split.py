"""How a global batch is cut: contiguous shares, one a part, that may change as a run goes on, and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from phalanx.config import Plan
from phalanx.config.sync import split_by_weight, weights


def share(total: int, part: int, parts: int) -> tuple[int, int]:
    """The range [start, stop) of ``total`` samples that belongs to ``part`` (0-based) of ``parts``.

    Shares are contiguous and differ by at most one sample; the first ones are the larger: 256 over 3 is 86, 85, 85.

    Raises:
        ValueError: if ``part`` is not one of ``parts``, or ``total`` is negative.
    """
    if not 0 <= part < parts or total < 0:
        raise ValueError(f"no part {part} of {parts} in {total} samples")
    size, larger = divmod(total, parts)
    start = part * size + min(part, larger)
    return start, start + size + (part < larger)


def spans(total: int, parts: int, each: Sequence[float] = ()) -> tuple[tuple[int, int], ...]:
    """The ranges [start, stop) of ``total`` samples that belong to each of ``parts``.

    ``each`` are weights of equally large runs of parts, such as the ranks of ``dp``: a run gets samples in proportion
    to its weight, which its parts share evenly. Without weights all parts do: ``spans(8, 4, (3, 1))`` is 3, 3, 1, 1.

    Raises:
        ValueError: if parts do not divide over the weights.
    """
    if not each:
        return tuple(share(total, part, parts) for part in range(parts))
    inner, left = divmod(parts, len(each))
    if left:
        raise ValueError(f"{parts} parts do not divide over {len(each)} weights")
    found: list[tuple[int, int]] = []
    first = 0
    for count in split_by_weight(total, each):
        for index in range(inner):
            start, stop = share(count, index, inner)
            found.append((first + start, first + stop))
        first += count
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """Which parts of every global batch this process holds.

    Rank r of 4 has ``Lane(first=r, count=1, parts=4)``; one process with 4 threads ``Lane(first=0, count=4, parts=4)``.

    Attributes:
        first: the first part held here, 0-based.
        count: parts held here.
        parts: parts over all processes.
        weights: of equally large runs of parts, as ``spans`` takes them; empty: all parts are even.
        alike: with weights, whether every part needs as many micro-batches as any other, because they communicate in
            each; otherwise only those of the same weight do.
    """

    first: int = 0
    count: int = 1
    parts: int = 1
    weights: tuple[float, ...] = ()
    alike: bool = True

    def __post_init__(self) -> None:
        if self.first < 0 or self.count < 1 or self.first + self.count > self.parts:
            raise ValueError(f"parts {self.first}..{self.first + self.count - 1} are not all among {self.parts} parts")

    @classmethod
    def of(cls, plan: Plan, rank: int) -> Lane:
        """The lane of ``rank`` under ``plan``; where its shares are ``auto``, the even one that they begin with."""
        return cls(
            first=plan.part(rank),
            count=plan.threads,
            parts=plan.replicas,
            weights=tuple(map(float, weights(plan.shares) or (1,) * plan.dp)) if plan.shares else (),
            # gradients of all are then scattered in each micro-batch
            alike=not plan.shares or (plan.zero >= 2 and plan.sync == "each"),
        )


Cuts = tuple[tuple[tuple[int, int], ...], ...]
"""For each part held, for each micro-batch, its range [start, stop) in the global batch. (0, 0) is a filler."""


def cuts(total: int, lane: Lane, micro: int | None) -> Cuts:
    """The micro-batches of a global batch of ``total`` samples, 1 or more, for the parts of ``lane``.

    Parts that take part in the same collectives get as many micro-batches as the largest share of them needs. Of even
    shares, one with fewer samples is filled up with empty ranges; uneven ones are each cut evenly into that many.
    ``micro`` is the most samples in a micro-batch; ``None``: the whole share.
    """
    each, inner = spans(total, lane.parts, lane.weights), lane.parts // max(1, len(lane.weights))
    found: list[tuple[tuple[int, int], ...]] = []
    for part in range(lane.first, lane.first + lane.count):
        first = part // inner * inner  # of the parts that share one weight with this one
        together = each if lane.alike else each[first : first + inner]
        largest = max(stop - start for start, stop in together)
        size = micro or max(1, largest)
        count = max(1, -(-largest // size))
        even = bool(lane.weights) and lane.alike
        cut = _evenly if even else _by_size
        found.append(tuple(cut(*each[part], index, count if even else size) for index in range(count)))
    return tuple(found)


def _by_size(start: int, stop: int, index: int, size: int) -> tuple[int, int]:
    first = start + index * size
    return (first, min(first + size, stop)) if first < stop else (0, 0)


def _evenly(start: int, stop: int, index: int, count: int) -> tuple[int, int]:
    first, last = share(stop - start, index, count)
    return (start + first, start + last) if first < last else (0, 0)


@final
class BatchSplitter:
    """Cuts the global batches of a run's steps for one lane, whose weights may change from a step on.

    ``next`` is the first step that has not been cut yet, and all after it have not.
    """

    def __init__(self, lane: Lane, micro: int | None, first: int = 0) -> None:
        """``micro``: most samples in a micro-batch. ``first``: the step to begin with."""
        self._lanes = [(first, lane)]
        self._micro = micro
        self._known: dict[tuple[int, Lane], Cuts] = {}
        self.next = first

    def lane(self, step: int) -> Lane:
        """The lane with the weights that hold in ``step``."""
        return next((lane for since, lane in reversed(self._lanes) if since <= step), self._lanes[0][1])

    def cuts(self, step: int, samples: int) -> Cuts:
        """The micro-batches of ``step``, whose global batch has ``samples``."""
        self.next = max(self.next, step + 1)
        key = samples, self.lane(step)
        found = self._known.get(key)
        return found if found is not None else self._known.setdefault(key, cuts(samples, key[1], self._micro))

    def change(self, weights: Sequence[float], step: int) -> None:
        """From ``step`` on parts have these weights. Every process has to be told the same.

        Raises:
            ValueError: if that step has been cut already, in this process.
        """
        if step < self.next:
            raise ValueError(f"step {step} has been dealt out already; the next is {self.next}")
        since, last = self._lanes[-1]
        kept = self._lanes[:-1] if since >= step else self._lanes
        self._lanes = [*kept, (step, replace(last, weights=tuple(weights)))]
        self._known.clear()


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Samples of one forward and backward.

    Attributes:
        batch: the collated samples.
        ids: their sample ids (stream positions for a stream).
        samples: how many they are. 0 marks a filler: ``batch`` then holds one real sample, so that forward and
            backward and their collectives can run, but it weighs nothing, and ``ids`` is empty.
    """

    batch: Any
    ids: tuple[int, ...]
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """What one process needs of one optimizer step; ``step`` and ``epoch`` count from 0 over the whole run.

    Attributes:
        samples: in the **global** batch, over all processes.
        parts: for each part held by this process, its micro-batches.
    """

    step: int
    epoch: int
    samples: int
    parts: tuple[tuple[MicroBatch, ...], ...]

    @property
    def here(self) -> int:
        """Samples of the global batch that this process holds."""
        return sum(micro.samples for part in self.parts for micro in part)


def step_batch(
    step: int, epoch: int, ids: np.ndarray, pieces: Cuts, load: Callable[[int, np.ndarray], Any]
) -> StepBatch:
    """The step whose global batch has these ``ids`` (int64), with ``load(epoch, ids)`` giving each micro-batch."""
    parts: list[tuple[MicroBatch, ...]] = []
    for part in pieces:
        micros: list[MicroBatch] = []
        for start, stop in part:
            if stop:
                own = ids[start:stop]
                batch = load(epoch, own)
                micros.append(MicroBatch(batch=batch, ids=tuple(own.tolist()), samples=stop - start))
            else:
                micros.append(MicroBatch(batch=load(epoch, ids[:1]), ids=(), samples=0))
        parts.append(tuple(micros))
    return StepBatch(step=step, epoch=epoch, samples=len(ids), parts=tuple(parts))
