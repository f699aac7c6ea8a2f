"""Interruptions of a run's steps beside its own schedule: a save by the clock, a request to stop.

A signal may come to one rank, and clocks differ, but a checkpoint belongs to one step. So ranks agree on the step, or
the batch of an evaluation, after which they all stop (``PointAgreement``).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from torch.distributed import PrefixStore, Store  # pyrefly: ignore

from phalanx.comm import Place, PointAgreement, meet
from phalanx.config import Plan, RunSpec


def no_signal() -> int:
    """Return 0, no signal: the ``asked`` of a run without a launcher."""
    return 0


def ignore_step(step: int) -> None:
    """Ignore the step: the ``report`` of a run without a launcher."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LauncherLink:
    """A worker's link to its launcher; by default there is no launcher.

    Attributes:
        report: called with the number of each optimizer step as it begins.
        asked: returns the number of the stop signal sent to this worker, or 0; one signalled worker makes all stop
            after the same step, which is saved.
    """

    report: Callable[[int], None] = ignore_step
    asked: Callable[[], int] = no_signal


@final
class Interruptions:
    """Requests to stop or save between steps. As a context manager it watches within the block.

    Attributes:
        stop: the signal that asks the run to stop, or 0; the same on every rank.
        save: whether the clock says to save; the same on every rank.
    """

    def __init__(
        self,
        run: RunSpec,
        asked: Callable[[], int] = no_signal,
        *,
        place: Place | None = None,
        store: Store | None = None,
    ) -> None:
        """Take ``asked``, which returns this process's stop signal or 0; a thread may call it.

        Args:
            place: of this rank among those that step together; ``None`` if this process decides for all.
            store: the ranks' store, if not the place's own.
        """
        self.stop, self.save = 0, False
        self._asked, self._leads = asked, place is None or place.rank == 0
        self._plan, self._seconds = run.plan, run.save_seconds
        self._saved = time.monotonic()
        self._agreement: PointAgreement | None = None
        if place is not None and place.world_size > 1:
            own = PrefixStore(f"phalanx/interruptions/{place.number}", store or meet(place))
            self._agreement = PointAgreement(own, place.rank, place.world_size, self._wanted)

    def reached(self, taken: int) -> bool:
        """Return True if the run pauses here; call it on every rank after each step with the steps taken."""
        self._look()
        return self.stop != 0 or (self.save and _together(self._plan, taken))

    def stopping(self) -> bool:
        """Return True if the run stops here; call it on every rank after each batch of an evaluation."""
        self._look()
        return self.stop != 0

    def saved(self) -> None:
        """Record a written checkpoint."""
        self.save, self._saved = False, time.monotonic()

    @property
    def signal(self) -> str:
        """Return the name of the stop signal, or ""."""
        return signal.Signals(self.stop).name if self.stop else ""

    def finish(self) -> None:
        """Tell the other ranks that this one has no more steps."""
        if self._agreement:
            self._agreement.close(finished=True)

    def __enter__(self) -> Interruptions:
        return self

    def __exit__(self, *_: object) -> None:
        if self._agreement:
            self._agreement.close()

    def _look(self) -> None:
        numbers = self._agreement.pass_point() if self._agreement else self._wanted()
        if numbers:
            number, save = numbers
            self.stop = self.stop or number
            self.save = self.save or bool(save)

    def _wanted(self) -> list[int]:
        """Return the signal to stop and True if it is time to save; 0 for an already agreed signal."""
        due = self._leads and bool(self._seconds) and time.monotonic() - self._saved >= self._seconds
        return [0 if self.stop else self._asked(), int(due and not self.save)]


def _together(plan: Plan, taken: int) -> bool:
    return plan.sync == "each" or taken <= plan.after or (taken - plan.after) % plan.every == 0
