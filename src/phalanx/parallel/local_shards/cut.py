"""The cut of one dimension of a tensor over ranks: integer arithmetic, no tensors.

A dimension of ``outer * units * inner`` elements is read as a table of that shape. Units are shared out; every rank
holds, for each of the ``outer`` repeats, all ``inner`` elements of its units. So heads of 64 features are cut between
heads (``inner=64``), a fused query-key-value projection inside each of its three parts (``outer=3``), and the tokens of
a flattened batch inside each sample (``outer=batch``). Ranks need not hold equally many units, and may hold several
ranges of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import gcd, prod

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Cut:
    """One dimension shared out over ranks."""

    outer: int  # repeats of the pattern
    units: int  # shared out within each repeat
    inner: int  # elements in a unit
    held: tuple[Ranges, ...]  # for each rank the ranges [start, stop) of units that it holds, in order

    @classmethod
    def even(cls, size: int, ranks: int, *, outer: int = 1, inner: int = 1) -> Cut:
        """Return contiguous shares that differ by at most one unit, the first ones larger; ``size`` elements in all."""
        units = size // (outer * inner)
        share, larger = divmod(units, ranks)
        starts = [rank * share + min(rank, larger) for rank in range(ranks + 1)]
        starts[-1] = units
        return cls.of(outer, units, inner, tuple(((a, b),) for a, b in pairwise(starts)))

    @classmethod
    def zigzag(cls, size: int, ranks: int) -> Cut:
        """Return a cut in which rank r holds the r-th of ``2 * ranks`` chunks from the front and from the back.

        Under a causal mask early tokens attend to few and late ones to many, so every rank has the same work.
        """
        chunks = Cut.even(size, 2 * ranks).expanded()
        return cls.of(1, size, 1, tuple(chunks[rank] + chunks[2 * ranks - 1 - rank] for rank in range(ranks)))

    @classmethod
    def of(cls, outer: int, units: int, inner: int, held: tuple[Ranges, ...]) -> Cut:
        """Return the cut in its largest units, without empty ranges, so that equal cuts compare equal."""
        joined = tuple(_joined(ranges) for ranges in held)
        edges = [edge for ranges in joined for pair in ranges for edge in pair]
        step = gcd(units, *edges) or 1
        coarse = tuple(tuple((a // step, b // step) for a, b in ranges) for ranges in joined)
        return cls(outer, units // step, inner * step, coarse)

    @property
    def size(self) -> int:
        return self.outer * self.units * self.inner

    @property
    def ranks(self) -> int:
        return len(self.held)

    def length(self, rank: int) -> int:
        """Return the number of elements of the dimension on ``rank``."""
        return self.outer * self.inner * sum(stop - start for start, stop in self.held[rank])

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self.length(rank) for rank in range(self.ranks))

    @property
    def equal(self) -> bool:
        """Return True if every rank holds equally many."""
        return len(set(self.lengths)) == 1

    @property
    def in_order(self) -> bool:
        """Return True if the ranks' parts, joined in rank order, give the whole dimension."""
        at = 0
        for ranges in self.held:
            if len(ranges) > 1 or (ranges and ranges[0][0] != at):
                return False
            at = ranges[0][1] if ranges else at
        return self.outer == 1

    def expanded(self) -> tuple[Ranges, ...]:
        """Return each rank's ranges of elements of the whole dimension, in order."""
        repeat = self.units * self.inner
        starts = [index * repeat for index in range(self.outer)]
        return tuple(
            _joined((start + a * self.inner, start + b * self.inner) for start in starts for a, b in ranges)
            for ranges in self.held
        )

    def same(self, other: Cut) -> bool:
        """Return True if every rank holds the same elements under both cuts."""
        return self == other or (self.size == other.size and self.expanded() == other.expanded())

    def flattened(self, before: int, after: int) -> Cut:
        """Return the cut after merging with dimensions of ``before`` elements left and ``after`` right of it."""
        return Cut.of(self.outer * before, self.units, self.inner * after, self.held)

    def unflattened(self, sizes: Sequence[int]) -> tuple[int, Cut] | None:
        """Return the cut dimension among ``sizes`` and its cut, after viewing; ``None`` if there is none."""
        for index, size in enumerate(sizes):
            before, after = prod(sizes[:index]), prod(sizes[index + 1 :])
            if self.outer % before or self.inner % after:
                continue
            outer, inner = self.outer // before, self.inner // after
            if outer * self.units * inner == size:
                return index, Cut.of(outer, self.units, inner, self.held)
        return None

    def part(self, start: int, stop: int) -> Cut | None:
        """Return the cut of elements [start, stop) of this dimension; ``None`` if a rank's part is not a slice.

        A rank's part must be one run of its elements.
        """
        repeat = self.units * self.inner
        if self.outer > 1:
            if start % repeat == 0 and stop % repeat == 0:
                return Cut.of((stop - start) // repeat, self.units, self.inner, self.held)
            return None
        held = tuple(
            tuple((max(a, start) - start, min(b, stop) - start) for a, b in ranges if max(a, start) < min(b, stop))
            for ranges in self.expanded()
        )
        return Cut.of(1, stop - start, 1, held)

    def offset(self, rank: int, start: int) -> int:
        """Return how many elements before ``start`` of the whole dimension are on ``rank``."""
        return sum(max(0, min(b, start) - a) for a, b in self.expanded()[rank])


def _joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if start == stop:
            continue
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)
