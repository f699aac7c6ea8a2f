"""How many samples each rank of ``dp`` should take, by what each needs for one. Pure; the same on every rank.

A rank that takes n samples computes for ``each * n + rest`` seconds, and a step lasts as long as the slowest. Shares
move only where that would save a margin of the step: what is measured is never quite the same twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

_SAME = 0.2  # of a pace: what differs by less may be noise, and is averaged with what was known


@dataclass(frozen=True, kw_only=True, slots=True)
class RankNeeds:
    """What one rank of ``dp`` needs.

    Attributes:
        each: seconds for a sample.
        rest: seconds of a step that do not depend on its samples, such as the optimizer's.
        most: samples of a global batch that it has memory for.
    """

    each: float
    rest: float = 0.0
    most: float = math.inf


def fastest(batch: int, paces: Sequence[RankNeeds], least: int = 1) -> tuple[int, ...]:
    """The samples of each rank, of ``batch`` in all, with which the slowest is done first.

    None gets fewer than ``least``, nor more than it has memory for.

    Raises:
        ValueError: if so many samples cannot be dealt out so.
    """
    most = [max(least, math.floor(min(pace.most, batch))) for pace in paces]
    if not least * len(paces) <= batch <= sum(most):
        raise ValueError(f"{batch} samples over ranks that take {least} or more and at most {most}")

    def within(seconds: float) -> list[int]:
        """The samples that each rank gets done in that time."""
        done = [math.floor((seconds - pace.rest) / pace.each) for pace in paces]
        return [max(least, min(one, limit)) for one, limit in zip(done, most, strict=True)]

    low, high = 0.0, max(pace.each * limit + pace.rest for pace, limit in zip(paces, most, strict=True))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(within(middle)) <= batch else (low, middle)
    counts = within(low)
    while sum(counts) < batch:
        free = [at for at, count in enumerate(counts) if count < most[at]]
        first = min(free, key=lambda at: (paces[at].each * (counts[at] + 1) + paces[at].rest, at))
        counts[first] += 1
    return tuple(counts)


def lasting(counts: Sequence[int], paces: Sequence[RankNeeds]) -> float:
    """Seconds until the slowest rank is done."""
    return max(pace.each * count + pace.rest for count, pace in zip(counts, paces, strict=True))


@final
class Balance:
    """Shares that follow the ranks' paces.

    Attributes:
        counts: samples of a full global batch that each rank of ``dp`` takes.
        paces: what each was last found to need; empty before the first look.
        wait: steps to measure before the next look; longer from look to look while nothing changes.
    """

    def __init__(
        self, counts: Sequence[int], *, least: int = 1, margin: float = 0.05, soon: int = 5, late: int = 40
    ) -> None:
        """Begins with ``counts``.

        Args:
            counts: samples of each rank.
            least: samples that each keeps, so that its pace can still be measured.
            margin: share of a step's time that a change must save.
            soon: steps before the first look, and before the one after a change.
            late: steps between looks at most.
        """
        self.counts = tuple(counts)
        self.paces: tuple[RankNeeds, ...] = ()
        self.wait = soon
        self._least, self._margin, self._soon, self._late = least, margin, soon, late

    def weigh(self, measured: Sequence[RankNeeds | None]) -> bool:
        """Take in what each rank has measured since the last look; whether ``counts`` changed.

        With a rank that has measured nothing (``None``) everything stays as it is.
        """
        told = [pace for pace in measured if pace is not None]
        if len(told) < len(self.counts):
            return False
        self.paces = tuple(_blended(old, new) for old, new in zip(self.paces or told, told, strict=True))
        # That a rank has memory for what it takes now has been seen.
        held = [
            RankNeeds(each=pace.each, rest=pace.rest, most=max(pace.most, count))
            for pace, count in zip(self.paces, self.counts, strict=True)
        ]
        better = fastest(sum(self.counts), held, min(self._least, *self.counts))
        if lasting(better, held) >= (1 - self._margin) * lasting(self.counts, held):
            self.wait = min(2 * self.wait, self._late)
            return False
        self.counts, self.wait = better, self._soon
        return True


def _blended(old: RankNeeds, new: RankNeeds) -> RankNeeds:
    alike = abs(new.each - old.each) <= _SAME * old.each
    each = (old.each + new.each) / 2 if alike else new.each
    return RankNeeds(each=each, rest=new.rest, most=new.most)
