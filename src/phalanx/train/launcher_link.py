"""What a worker and the launcher that started it say to each other while a run takes its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


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
