"""Uneven shares of a run: what they are, and with ``shares=auto`` how they follow the speed of each rank of ``dp``.

Each rank times its own computing. Every few steps all tell each other, come to the same new shares, and let them hold
from a step on that nobody has begun to read. What is computed stays the same: only the cut of a batch moves.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from phalanx.comm import Place, from_every_rank
from phalanx.config import Job, Plan
from phalanx.config.sync import AUTO, dealt
from phalanx.data import Loader, StepBatch
from phalanx.errors import Problem, RefusedError
from phalanx.parallel import Held
from phalanx.train.balance import Balance, Pace
from phalanx.train.pace import Lap, Stopwatch
from phalanx.train.room import Room

_WARM_UP = 2  # steps that are not timed: allocation, first touch, compilation


@dataclass(frozen=True, kw_only=True, slots=True)
class Shift:
    """Shares as they are from a step on.

    Attributes:
        step: the first that they hold for.
        shares: samples of a full global batch that each rank of ``dp`` takes.
        seconds: that each rank of ``dp`` computes for a sample, as measured before; empty where nothing was.
    """

    step: int
    shares: tuple[int, ...]
    seconds: tuple[float, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As the fields of an event."""
        return {"step": self.step, "shares": list(self.shares), "seconds": list(self.seconds)}


@final
class Sharing:
    """The shares of a run's ranks, which follow their speed where the plan says ``shares=auto``.

    A run that is resumed begins with even shares again, and measures anew.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        place: Place,
        loader: Loader,
        step: int,
        everyone: Callable[[Any], list[Any]] = from_every_rank,
    ) -> None:
        """``step``: the first that is taken. ``everyone``: gives a value of each rank of the plan.

        Raises:
            RefusedError: if shares cannot change because processes of their own read a stream ahead.
        """
        self._plan, self._place, self._loader, self._everyone = plan, place, loader, everyone
        full = min(job.batch, loader.length or job.batch)
        counts = dealt(full, loader.lane(step).weights)
        self._news = [Shift(step=step, shares=counts)]
        self._balance: Balance | None = None
        if plan.shares == AUTO:
            if not loader.deals_here:
                raise RefusedError([_read_ahead(job, plan)])
            self._balance = Balance(counts, least=min(plan.fsdp * plan.ep, *counts))
        self._watch: Stopwatch | None = None
        self._room = Room(cuda=False, workers_here=place.workers_here, bounded=plan.micro is not None)
        self._since = step + _WARM_UP
        self._laps: list[tuple[Lap, int]] = []

    def watch(self, held: Held, optimizer: torch.optim.Optimizer, *, cuda: bool) -> None:
        """Time the steps of this rank from now on, if shares follow its speed."""
        if self._balance is None:
            return
        self._watch = Stopwatch(held, optimizer, backward=self._plan.zero == 0, cuda=cuda)
        self._room = Room(cuda=cuda, workers_here=self._place.workers_here, bounded=self._plan.micro is not None)

    def saved(self, nbytes: int, samples: int) -> None:
        """Autograd has saved so many bytes for a step with so many samples here."""
        self._room.saved(nbytes, samples)

    def news(self) -> Sequence[Shift]:
        """What has changed since this was last asked for; at first, the shares at the begin."""
        found, self._news = self._news, []
        return found

    def stepped(self, batch: StepBatch) -> None:
        """A step was taken. Collective, now and then."""
        balance = self._balance
        if balance is None or self._watch is None:
            return
        lap = self._watch.lap()
        self._room.took(batch.here)
        if batch.step < self._since:
            return
        if batch.here:
            self._laps.append((lap, batch.here))
        if batch.step + 1 - self._since >= balance.wait and (batch.step + 1) % self._plan.every == 0:
            self._look(balance, batch.step)

    def _look(self, balance: Balance, step: int) -> None:
        rows = self._everyone([*self._measured(), self._room.most(), self._loader.next_step])
        self._laps.clear()
        self._since = step + 1
        if not balance.weigh(self._by_replica(rows)):
            return
        start = max(int(row[3]) for row in rows)
        if self._loader.total_steps is not None and start >= self._loader.total_steps:
            return  # all that is left has been read already
        self._loader.deal(balance.counts, start)
        seconds = tuple(pace.each for pace in balance.paces)
        self._news.append(Shift(step=start, shares=balance.counts, seconds=seconds))
        self._since = start + 1  # memory for the new sizes is allocated in the first step with them

    def _measured(self) -> tuple[float, float]:
        """Seconds of this rank for each of its samples, and beside them; NaN where it has had none."""
        if not self._laps:
            return math.nan, 0.0
        each = _middle([lap.passes / samples for lap, samples in self._laps])
        return each, _middle([lap.update for lap, _ in self._laps])

    def _by_replica(self, rows: Sequence[Sequence[float]]) -> list[Pace | None]:
        """The pace of each rank of ``dp``: that of the slowest of its ranks, and the least memory of them."""
        found: list[list[Sequence[float]]] = [[] for _ in range(self._plan.dp)]
        for rank, row in enumerate(rows):
            found[self._plan.coordinate(rank)["dp"]].append(row)
        return [_pace(those, self._plan.fsdp * self._plan.ep) for those in found]


def _pace(rows: Sequence[Sequence[float]], inner: int) -> Pace | None:
    each = max((row[0] for row in rows if row[0] > 0), default=0.0)
    if not each:
        return None
    return Pace(each=each / inner, rest=max(row[1] for row in rows), most=min(row[2] for row in rows) * inner)


def _middle(values: Sequence[float]) -> float:
    """The mean of the middle half: steps that something else held up do not count, nor does one that was lucky."""
    ordered = sorted(values)
    out = len(ordered) // 4
    return statistics.fmean(ordered[out : len(ordered) - out])


def _read_ahead(job: Job, plan: Plan) -> Problem:
    return Problem(
        where="plan.shares",
        given=f"{plan} over a stream that {job.workers} processes read ahead",
        allowed="shares=auto over map-style data, or over a stream read with workers=0: shares move while it is read",
        fix="job(workers=0)",
    )
