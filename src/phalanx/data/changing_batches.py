"""The samples of each optimizer step in runs whose batch or data change with the step.

A run is a row of stretches; the steps of a stretch take batches of one size from one part of the data. A part is read
in passes: each is a permutation keyed by (seed, pass over this part), and a batch begins at the end of the previous
one. When another part begins, the running pass ends.

As with ``GlobalBatchSampler`` any step is computed by itself, in memory and time independent of the step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np

from phalanx.data.sampler import Permutation, each_step, size_problems
from phalanx.errors import SpecError

Order = Callable[[int], np.ndarray]
"""Pass over a part → the places in it that are due, in order, int64."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Steps with equal batch and data part.

    Attributes:
        first: the first step; the next stretch, or the end of the run, ends it.
        batch: samples in each of their global batches.
        begin: the first sample of their part of the data.
        size: samples in that part.
        each: samples in a pass over it: ``size``, or a sampler's number.
    """

    first: int
    batch: int
    begin: int
    size: int
    each: int


class _BatchPlace(NamedTuple):
    """The place where a step's batch begins (pass of the run, pass of this part, position), and its samples."""

    epoch: int
    own: int
    position: int
    samples: int


@final
class ChangingBatchSampler:
    """The sample ids of every global batch of a run with these stretches.

    Attributes:
        stretches: the first begins with step 0.
        length: samples in the longest pass.
    """

    steps_per_epoch = None  # passes may have unlike numbers of steps

    def __init__(
        self,
        stretches: Sequence[Stretch],
        *,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = False,
        orders: Mapping[int, Order] | None = None,
    ) -> None:
        """Take the stretches; ``orders`` maps the first sample of a part to the part's own order.

        Raises:
            SpecError: if a part has no sample, or ``drop_last`` would drop all of them.
        """
        for one in stretches:
            if problems := size_problems(one.each, one.batch, drop_last, f" from step {one.first} on"):
                raise SpecError(problems)
        self.stretches = tuple(stretches)
        self.length = max(one.each for one in stretches)
        self._seed, self._shuffle, self._drop_last, self._orders = seed, shuffle, drop_last, dict(orders or {})
        self._firsts = [one.first for one in stretches]
        self._begins = [_BatchPlace(epoch=0, own=0, position=0, samples=0)]
        for at, (one, after) in enumerate(zip(self.stretches, self.stretches[1:], strict=False)):
            last = self._place(at, after.first - one.first - 1)
            same = after.begin == one.begin
            self._begins.append(
                last._replace(position=last.position + last.samples, samples=0)
                if same
                else _BatchPlace(epoch=last.epoch + 1, own=0, position=0, samples=0)
            )
        self._known: tuple[tuple[int, int], Callable[[np.ndarray], np.ndarray] | None] | None = None

    def epoch_of(self, step: int) -> int:
        """Return the pass, 0-based over the run, of optimizer step ``step``."""
        return self._of(step)[1].epoch

    def samples(self, step: int) -> int:
        """Return the samples in the global batch of ``step``; the last in a pass may be smaller."""
        return self._of(step)[1].samples

    def ids(self, step: int) -> np.ndarray:
        """Return the sample ids, int64, of the whole global batch of step ``step`` (0-based over the run)."""
        stretch, place = self._of(step)
        positions = np.arange(place.position, place.position + place.samples, dtype=np.int64)
        order = self._order(stretch, place.own)
        return stretch.begin + (positions if order is None else order(positions))

    walk = each_step

    def steps_of(self, epochs: int) -> int:
        """Return the optimizer steps in so many passes over one part of the data."""
        total = 0
        for at, stretch in enumerate(self.stretches):
            begin = self._begins[at]
            whole = self._steps(stretch, stretch.each)
            total = stretch.first + self._steps(stretch, stretch.each - begin.position)
            total += (epochs - begin.own - 1) * whole
            # at the next one's first, a smaller batch may take what this one leaves out
            if at + 1 < len(self.stretches) and total < self.stretches[at + 1].first:
                break
        return total

    def _of(self, step: int) -> tuple[Stretch, _BatchPlace]:
        at = bisect_right(self._firsts, step) - 1
        return self.stretches[at], self._place(at, step - self._firsts[at])

    def _place(self, at: int, steps: int) -> _BatchPlace:
        stretch, begin = self.stretches[at], self._begins[at]
        rest = self._steps(stretch, stretch.each - begin.position)  # of the pass in which the stretch begins
        own, position = begin.own, begin.position + steps * stretch.batch
        if steps >= rest:
            passes, left = divmod(steps - rest, self._steps(stretch, stretch.each))
            own, position = begin.own + 1 + passes, left * stretch.batch
        samples = min(stretch.batch, stretch.each - position)
        return _BatchPlace(epoch=begin.epoch + own - begin.own, own=own, position=position, samples=samples)

    def _steps(self, stretch: Stretch, samples: int) -> int:
        return samples // stretch.batch if self._drop_last else -(-samples // stretch.batch)

    def _order(self, stretch: Stretch, own: int) -> Callable[[np.ndarray], np.ndarray] | None:
        key = stretch.begin, own
        if self._known is None or self._known[0] != key:
            order: Any = None
            if stretch.begin in self._orders:
                order = self._orders[stretch.begin](own).__getitem__
            elif self._shuffle:
                order = Permutation.keyed(stretch.each, self._seed, own)
            self._known = key, order
        return self._known[1]


def never_reached(stretches: Sequence[Stretch], total_steps: int | None) -> list[str]:
    """Return a sentence for each stretch that begins after the run's last step."""
    several = len({one.begin for one in stretches}) > 1
    return [
        f"step {one.first}, from which on a batch has {one.batch} samples"
        f"{f' of the data set that begins with sample {one.begin}' if several else ''}, is never reached: the run ends "
        f"after {total_steps} steps."
        for one in stretches
        if total_steps is not None and one.first >= total_steps
    ]
