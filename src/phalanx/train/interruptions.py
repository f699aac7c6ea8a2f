"""What interrupts a run's steps beside its own schedule: a save by the clock, a request to stop.

A signal may come to one rank, and clocks differ: but a checkpoint is of one step. So ranks agree after which step, or
which batch of an evaluation, they all leave off (``PointAgreement``).
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
    """No signal asks the run to stop: the ``asked`` of a run without a launcher."""
    return 0


def ignore_step(step: int) -> None:
    """The ``report`` of a run without a launcher."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LauncherLink:
    """What a worker reports to its launcher, and what it asks it; as it is, there is no launcher.

    Attributes:
        report: called with the number of each optimizer step as it begins.
        asked: gives the number of the signal by which this worker was asked to stop, 0 where it was not; one worker is
            enough for all to stop after the same step, which is saved.
    """

    report: Callable[[int], None] = ignore_step
    asked: Callable[[], int] = no_signal


@final
class Interruptions:
    """Requests to stop or save between steps. As a context: watches within the block.

    Attributes:
        stop: the signal that asks the run to stop, 0 where none does; the same on every rank.
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
        """``asked`` gives the number of the signal that this process got, 0 for none; a thread may call it.

        Args:
            place: of this rank among those that step together; ``None`` where this process decides for all.
            store: where they meet, if not at the place's own.
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
        """Called on every rank after each step, with the steps taken so far: whether to leave off here."""
        self._look()
        return self.stop != 0 or (self.save and _together(self._plan, taken))

    def stopping(self) -> bool:
        """Called on every rank after each batch of what is no step: whether to leave off."""
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
        """No more steps come."""
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
