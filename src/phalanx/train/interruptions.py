"""What interrupts a run's steps beside its own schedule: a save by the clock, a request to stop.

A signal may come to one rank, and clocks differ: but a checkpoint is of one step. So about once a second, after the
same step on every rank, the ranks exchange three numbers: the signal that any of them got, whether rank 0's clock says
to save, and after how many steps to exchange again, which follows from how long rank 0's steps take. A step that
takes longer than that is followed by an exchange each. Where replicas step by themselves, what is
exchanged is waited for only when the next exchange begins, so that no replica waits for another's step.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import final

import torch
import torch.distributed as dist

from phalanx.config import Plan, RunSpec
from phalanx.train.launcher_link import no_signal

_PERIOD = 1.0  # seconds between exchanges
_MOST = 1000  # steps between exchanges


@final
class Interruptions:
    """Whether to leave off stepping.

    Attributes:
        stop: the signal that asks the run to stop, 0 where none does; the same on every rank.
        save: whether the clock says to save; the same on every rank.
    """

    def __init__(
        self,
        run: RunSpec,
        asked: Callable[[], int] = no_signal,
        *,
        group: dist.ProcessGroup | None = None,
        leads: bool = True,
    ) -> None:
        """``asked`` gives the number of the signal that this process got, 0 for none.

        ``group``: of all ranks, by which host tensors are exchanged; ``None`` where this process decides for all.
        ``leads``: it is this process whose clock counts.
        """
        self.stop, self.save = 0, False
        self._asked, self._group, self._leads = asked, group, leads
        self._plan, self._seconds = run.plan, run.save_seconds
        self._waits = run.plan.sync == "each"
        self._saved = self._exchanged = time.monotonic()
        self._steps = self._interval = 1  # until the next exchange, and from the last one to it
        self._work: dist.Work | None = None
        self._numbers = torch.zeros(3, dtype=torch.int64)

    def reached(self, taken: int) -> bool:
        """Called on every rank after each step, with the steps taken so far: whether to leave off here. Collective."""
        self._look()
        return self.stop != 0 or (self.save and _together(self._plan, taken))

    def stopping(self) -> bool:
        """Called on every rank after each batch of what is no step: whether to leave off. Collective."""
        self._look()
        return self.stop != 0

    def saved(self) -> None:
        """A checkpoint was written."""
        self.save, self._saved = False, time.monotonic()

    @property
    def signal(self) -> str:
        """The name of the signal that asks to stop; empty where none does."""
        return signal.Signals(self.stop).name if self.stop else ""

    def finish(self) -> None:
        """No more steps come: what is on its way is waited for."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _look(self) -> None:
        if self._group is None:
            self._take([self._asked(), self._time_to_save(), 1])
            return
        self._steps -= 1
        if self._steps > 0:
            return
        if self._work is not None:
            self._work.wait()
            self._take(self._numbers.tolist())
        numbers = [self._asked(), self._time_to_save(), self._next() if self._leads else 0]
        self._numbers = torch.tensor(numbers, dtype=torch.int64)
        self._work = dist.all_reduce(self._numbers, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        if self._waits and self._work is not None:
            self._work.wait()
            self._work = None
            self._take(self._numbers.tolist())
        self._steps = self._interval

    def _take(self, numbers: list[int]) -> None:
        number, save, self._interval = numbers
        self.stop = self.stop or number
        self.save = self.save or bool(save)

    def _time_to_save(self) -> int:
        return int(self._leads and bool(self._seconds) and time.monotonic() - self._saved >= self._seconds)

    def _next(self) -> int:
        """Steps until the next exchange: as many as fit into the period, at most twice as many as last time."""
        now = time.monotonic()
        step, self._exchanged = (now - self._exchanged) / self._interval, now
        fitting = int(_PERIOD / step) if step else _MOST
        return max(1, min(fitting, 2 * self._interval, _MOST))


def _together(plan: Plan, taken: int) -> bool:
    """Whether replicas are equal after so many steps anyway, so that a save changes nothing."""
    return plan.sync == "each" or taken <= plan.after or (taken - plan.after) % plan.every == 0
