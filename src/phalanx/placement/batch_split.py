"""The cut of a global batch: contiguous shares, one a part, that may change during a run, and micro-batches.

The runtime cuts by it, and drawings and prices use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from phalanx.config import Plan
from phalanx.config.sync import AUTO, split_by_weight, weights

Number = Any
"""A whole number, or an array with one for each of many plans."""


def share(total: int, part: int, parts: int) -> tuple[int, int]:
    """Return the range [start, stop) of ``total`` samples for ``part`` (0-based) of ``parts``.

    Shares are contiguous and differ by at most one sample. The first ones are the larger: 256 over 3 is 86, 85, 85.

    Raises:
        ValueError: if ``part`` is not one of ``parts``, or ``total`` is negative.
    """
    if not 0 <= part < parts or total < 0:
        raise ValueError(f"no part {part} of {parts} in {total} samples")
    size, larger = divmod(total, parts)
    start = part * size + min(part, larger)
    return start, start + size + (part < larger)


def spans(total: int, parts: int, each: Sequence[float] = ()) -> tuple[tuple[int, int], ...]:
    """Return the ranges [start, stop) of ``total`` samples for each of ``parts``.

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
    """The parts of every global batch held by this process.

    Rank r of 4 has ``Lane(first=r, count=1, parts=4)``; one process with 4 threads ``Lane(first=0, count=4, parts=4)``.

    Attributes:
        first: the first part held here, 0-based.
        count: parts held here.
        parts: parts over all processes.
        weights: of equally large runs of parts, as in ``spans``; empty: all parts are even.
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
        """Return the lane of ``rank`` under ``plan``; ``auto`` shares begin even."""
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
    """Return the micro-batches of a global batch of ``total`` samples, 1 or more, for the parts of ``lane``.

    Parts in the same collectives get as many micro-batches as the largest share of them needs. An even share with fewer
    samples is filled up with empty ranges. Uneven ones are each cut evenly into that many. ``micro`` is the most
    samples in a micro-batch; ``None``: the whole share.
    """
    runs, inner = _runs(total, lane)
    found: list[tuple[tuple[int, int], ...]] = []
    for part in range(lane.first, lane.first + lane.count):
        run, place = divmod(part, inner)  # parts of one run share one weight
        first, held = runs[run]
        largest = largest_even(max(size for _, size in runs) if lane.alike else held, inner)
        size = micro or max(1, largest)
        count = max(1, pieces(largest, size))
        even = bool(lane.weights) and lane.alike
        cut = _evenly if even else _by_size
        start, stop = (first + end for end in share(held, place, inner))
        found.append(tuple(cut(start, stop, index, count if even else size) for index in range(count)))
    return tuple(found)


def _runs(total: int, lane: Lane) -> tuple[list[tuple[int, int]], int]:
    """Return the first sample and the sample count of each run of parts with equal weight, and each run's parts.

    A part's share follows from its run alone, so that no rank computes the shares of all others.
    """
    if not lane.weights:
        return [(0, total)], lane.parts
    inner, left = divmod(lane.parts, len(lane.weights))
    if left:
        raise ValueError(f"{lane.parts} parts do not divide over {len(lane.weights)} weights")
    counts = split_by_weight(total, lane.weights)
    return list(zip(accumulate(counts, initial=0), counts, strict=False)), inner


def _by_size(start: int, stop: int, index: int, size: int) -> tuple[int, int]:
    first = start + index * size
    return (first, min(first + size, stop)) if first < stop else (0, 0)


def _evenly(start: int, stop: int, index: int, count: int) -> tuple[int, int]:
    first, last = share(stop - start, index, count)
    return (start + first, start + last) if first < last else (0, 0)


def micro_batches(plan: Plan, batch: int) -> int:
    """Return the micro-batches of the largest share of a full global batch."""
    lane = Lane.of(plan, 0)
    runs, inner = _runs(batch, lane)
    largest = largest_even(max(size for _, size in runs), inner)
    return max(1, pieces(largest, plan.micro or max(1, largest)))


def largest_share(plan: Plan, batch: int) -> int:
    """Return the most samples of a global ``batch`` on one replica, at any time of a run."""
    each, inner = weights(plan.shares), plan.replicas // plan.dp
    if plan.shares == AUTO:  # any other rank may end with as little as one sample a replica
        return max(1, largest_even(batch - (plan.dp - 1) * inner, inner))
    return largest_even(max(split_by_weight(batch, each)), inner) if each else largest_even(batch, plan.replicas)


def largest_even(total: Number, parts: Number) -> Number:
    """Return the samples of the largest of ``parts`` even shares, the first; see ``share``."""
    return -(-total // parts)


def pieces(share: Number, micro: Number) -> Number:
    """Return the number of micro-batches of at most ``micro`` samples in a share."""
    return -(-share // micro)
