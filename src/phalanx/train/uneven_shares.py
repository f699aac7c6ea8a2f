"""Uneven shares of a run, and their adaptation to each rank's speed and memory with ``shares=auto``.

Each rank times its own computing. Every few steps all exchange their times, compute the same new shares, and apply them
from a step that no rank has begun to read. The result stays the same: only the cut of a batch moves. A rank with n
samples computes for ``each * n + rest`` seconds, and a step lasts as long as the slowest. Shares move only if that
would save a margin of the step, because measurements vary.

A rank's own time excludes its waits for other replicas. If replicas exchange only the last gradients' sums (``zero``
0), it runs from the begin of the first forward to the moment at which backward has this rank's last gradient. If
backward itself waits for other replicas (``zero`` 1 to 3), it is the time of forward alone, which is about the same
part of the whole on every device. On CUDA moments are events on the computing stream.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from phalanx.comm import Place, from_every_rank
from phalanx.config import Job, Plan
from phalanx.config.sync import AUTO, split_by_weight
from phalanx.data import Loader, StepBatch
from phalanx.device_kinds import DeviceKind, DeviceMemory, host
from phalanx.errors import Problem, RefusedError
from phalanx.hardware import memory_bytes, peak_memory
from phalanx.parallel import RankHoldings

_WARM_UP = 2  # steps that are not timed: allocation, first touch, compilation
_SAME = 0.2  # of a pace: what differs by less may be noise, and is averaged with what was known
_MARGIN = 0.05  # of a step's time, which a change must save
_SOON = 5  # steps before the first look, and before the one after a change
_LATE = 40  # steps between looks, at most
_USABLE = 0.9  # of free memory: allocators do not come out even


@dataclass(frozen=True, kw_only=True, slots=True)
class SharesFrom:
    """The shares from ``step`` on: the ``shares`` event of the log, with its fields."""

    step: int
    shares: tuple[int, ...]
    seconds: tuple[float, ...] = ()


@final
class Sharing:
    """The shares of a run's ranks, which follow their speed if the plan says ``shares=auto``.

    A resumed run begins with even shares again, and measures anew.
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
        """Begin at ``step``; ``everyone`` returns a value of each rank of the plan.

        Raises:
            RefusedError: if shares cannot change because other processes read a stream ahead.
        """
        self._plan, self._place, self._loader, self._everyone = plan, place, loader, everyone
        full = min(job.batch, loader.epoch_samples or job.batch)
        counts = split_by_weight(full, loader.lane(step).weights)
        self._news = [SharesFrom(step=step, shares=counts)]
        self._balance: Balance | None = None
        if plan.shares == AUTO:
            if not loader.deals_here:
                raise RefusedError([read_ahead(job, plan)])
            self._balance = Balance(counts, least=min(plan.fsdp * plan.ep, *counts))
        self._watch: Stopwatch | None = None
        self._room = MemoryRoom(host(), workers_here=place.workers_here, bounded=plan.micro is not None)
        self._since = step + _WARM_UP
        self._laps: list[tuple[StepTiming, int]] = []

    def watch(self, held: RankHoldings, optimizer: torch.optim.Optimizer, kind: DeviceKind) -> None:
        """Time the steps of this rank from now on, if shares follow its speed."""
        if self._balance is None:
            return
        self._watch = Stopwatch(held, optimizer, kind, backward=self._plan.zero == 0)
        self._room = MemoryRoom(kind, workers_here=self._place.workers_here, bounded=self._plan.micro is not None)

    def saved(self, nbytes: int, samples: int) -> None:
        """Record the bytes that autograd has saved for a step with this many samples here."""
        self._room.saved(nbytes, samples)

    def news(self) -> Sequence[SharesFrom]:
        """Return changes since the last call; at first, the shares at the begin."""
        found, self._news = self._news, []
        return found

    def stepped(self, batch: StepBatch) -> None:
        """Count a step, and adapt the shares if due. Collective, now and then."""
        if (balance := self._balance) is None or self._watch is None:
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
        self._loader.set_weights(balance.counts, start)
        seconds = tuple(pace.each for pace in balance.paces)
        self._news.append(SharesFrom(step=start, shares=balance.counts, seconds=seconds))
        self._since = start + 1  # memory for the new sizes is allocated in the first step with them

    def _measured(self) -> tuple[float, float]:
        if not self._laps:
            return math.nan, 0.0
        each = _middle([lap.passes / samples for lap, samples in self._laps])
        return each, _middle([lap.update for lap, _ in self._laps])

    def _by_replica(self, rows: Sequence[Sequence[float]]) -> list[RankNeeds | None]:
        found: list[list[Sequence[float]]] = [[] for _ in range(self._plan.dp)]
        for rank, row in enumerate(rows):
            found[self._plan.coordinate(rank)["dp"]].append(row)
        return [_pace(those, self._plan.fsdp * self._plan.ep) for those in found]


def _pace(rows: Sequence[Sequence[float]], inner: int) -> RankNeeds | None:
    each = max((row[0] for row in rows if row[0] > 0), default=0.0)
    if not each:
        return None
    return RankNeeds(each=each / inner, rest=max(row[1] for row in rows), most=min(row[2] for row in rows) * inner)


def _middle(values: Sequence[float]) -> float:
    """Return the mean of the middle half, without steps that were delayed or lucky."""
    ordered = sorted(values)
    out = len(ordered) // 4
    return statistics.fmean(ordered[out : len(ordered) - out])


def read_ahead(job: Job, plan: Plan) -> Problem:
    """Return the problem of ``shares=auto`` with a stream that other processes read ahead."""
    given = f"{plan} over a stream that {job.workers} processes read ahead"
    allowed = "shares=auto over map-style data, or over a stream read with workers=0: shares move while it is read"
    return Problem(where="plan.shares", given=given, allowed=allowed, fix="px.Job(..., workers=0)")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankNeeds:
    """The needs of one rank of ``dp``.

    Attributes:
        each: seconds for a sample.
        rest: seconds of a step that do not depend on its samples, such as the optimizer's.
        most: samples of a global batch that fit its memory.
    """

    each: float
    rest: float = 0.0
    most: float = math.inf


def fastest(batch: int, paces: Sequence[RankNeeds], least: int = 1) -> tuple[int, ...]:
    """Return the samples of each rank, of ``batch`` in all, with the earliest end of the slowest rank.

    Each gets at least ``least``, and at most as many as fit its memory.

    Raises:
        ValueError: if that is impossible.
    """
    most = [max(least, math.floor(min(pace.most, batch))) for pace in paces]
    if not least * len(paces) <= batch <= sum(most):
        raise ValueError(f"{batch} samples over ranks that take {least} or more and at most {most}")

    def within(seconds: float) -> list[int]:
        """Return the samples each rank computes in that time."""
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
    """Return the seconds until the slowest rank is done."""
    return max(pace.each * count + pace.rest for count, pace in zip(counts, paces, strict=True))


@final
class Balance:
    """Shares that follow the ranks' paces.

    Attributes:
        counts: samples of a full global batch for each rank of ``dp``.
        paces: the last known needs of each; empty before the first look.
        wait: steps to measure before the next look; it grows while shares do not change.
    """

    def __init__(self, counts: Sequence[int], *, least: int = 1) -> None:
        """Begin with ``counts``, the samples of each rank; each keeps ``least``, so that its pace is still measured."""
        self.counts = tuple(counts)
        self.paces: tuple[RankNeeds, ...] = ()
        self.wait = _SOON
        self._least = least

    def weigh(self, measured: Sequence[RankNeeds | None]) -> bool:
        """Take each rank's measurements since the last look; return True if ``counts`` changed.

        If a rank has measured none (``None``), shares are kept.
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
        if lasting(better, held) >= (1 - _MARGIN) * lasting(self.counts, held):
            self.wait = min(2 * self.wait, _LATE)
            return False
        self.counts, self.wait = better, _SOON
        return True


def _blended(old: RankNeeds, new: RankNeeds) -> RankNeeds:
    each = (old.each + new.each) / 2 if abs(new.each - old.each) <= _SAME * old.each else new.each
    return RankNeeds(each=each, rest=new.rest, most=new.most)


Moment = float | torch.Event


@final
class Stopwatch:
    """A timer of one rank's steps, by hooks on the model and the optimizer."""

    def __init__(
        self, held: RankHoldings, optimizer: torch.optim.Optimizer, kind: DeviceKind, *, backward: bool
    ) -> None:
        """Attach to model and optimizer; ``backward``: time it, too, as it does not wait for other replicas."""
        self._kind, self._backward = kind, backward
        self._passes: list[tuple[Moment, Moment]] = []
        self._update: tuple[Moment, Moment] | None = None
        self._began: Moment | None = None
        self._ended: Moment | None = None
        held.module.register_forward_pre_hook(self._enter)
        held.module.register_forward_hook(self._leave)
        optimizer.register_step_pre_hook(self._update_begins)
        optimizer.register_step_post_hook(self._update_ends)
        for tensor in held.module.parameters() if backward else ():
            if tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(self._gradient)

    def lap(self) -> StepTiming:
        """Return the step that ends here, and begin the next."""
        passes = self._passes
        if self._backward and self._began is not None and self._ended is not None:
            passes = [(self._began, self._ended)]
        found = StepTiming(passes, self._update)
        self._passes, self._update, self._began, self._ended = [], None, None, None
        return found

    def _now(self, again: Moment | None = None) -> Moment:
        if not self._kind.streams:
            self._kind.synchronize()
            return time.perf_counter()
        event = self._kind.event(timed=True) if again is None or isinstance(again, float | int) else again
        event.record()
        return event

    def _enter(self, *_: Any) -> None:
        if torch.is_grad_enabled() and (self._began is None or not self._backward):
            self._began = self._now()

    def _leave(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not self._backward and self._began is not None:
            self._passes.append((self._began, self._now()))

    def _gradient(self, _: torch.Tensor) -> None:
        self._ended = self._now(self._ended)

    def _update_begins(self, *_: Any) -> None:
        self._update = self._now(), 0.0

    def _update_ends(self, *_: Any) -> None:
        if self._update is not None:
            self._update = self._update[0], self._now()


@dataclass(frozen=True, slots=True)
class StepTiming:
    """The times of one step; reading its seconds waits for the device."""

    moments: list[tuple[Moment, Moment]]
    stepping: tuple[Moment, Moment] | None

    @property
    def passes(self) -> float:
        """Return the seconds that depend on the samples; 0 if not timed."""
        return sum(_between(*one) for one in self.moments)

    @property
    def update(self) -> float:
        """Return the seconds of the optimizer."""
        return _between(*self.stepping) if self.stepping else 0.0


def _between(begin: Moment, end: Moment) -> float:
    if isinstance(begin, float | int) or isinstance(end, float | int):
        return end - begin if isinstance(begin, float | int) and isinstance(end, float | int) else 0.0
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


@final
class MemoryRoom:
    """A tracker of one rank's memory. Micro-batches of a stated size need no tracking."""

    def __init__(self, kind: DeviceKind, *, workers_here: int, bounded: bool) -> None:
        """Take the device kind; ``bounded``: micro-batches do not grow with a rank's samples."""
        self._kind, self._workers, self._bounded = kind, workers_here, bounded
        self._seen = 0
        self._saved = 0.0

    def took(self, samples: int) -> None:
        """Record a step with this many samples."""
        self._seen = max(self._seen, samples)

    def saved(self, nbytes: int, samples: int) -> None:
        """Record the bytes that autograd has saved for a forward with this many samples."""
        if samples:
            self._saved = max(self._saved, nbytes / samples)

    def most(self) -> float:
        """Return the samples that fit memory; infinite if unknown."""
        if self._bounded or not self._seen:
            return math.inf
        memory = self._kind.memory()
        each, free = self._on_device(memory) if memory else (self._saved, self._on_host())
        return self._seen + math.floor(max(0.0, _USABLE * free) / each) if each > 0 else math.inf

    def _on_device(self, memory: DeviceMemory) -> tuple[float, float]:
        return (memory.peak - memory.allocated) / self._seen, memory.free + memory.reserved - memory.peak

    def _on_host(self) -> float:
        return memory_bytes() / self._workers - peak_memory()
