"""Which shares hold in which step, for shares that change while a run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from phalanx.data.shares import Cuts, Lane, cuts


@final
class Dealing:
    """Cuts the global batches of a run's steps for one lane, whose weights may change from a step on.

    Attributes:
        next: the first step that has not been cut yet, and all after it have not.
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
