"""What every contender's script reports: when its first step was done, and how long the later ones took."""

from __future__ import annotations

import json
import statistics
import time

WARM_UP = 3


class Stopwatch:
    """Call ``begin`` when the batch is in hand and ``done`` after the optimizer's step."""

    def __init__(self) -> None:
        self._first_step: float | None = None
        self._began: float | None = None
        self._steps: list[float] = []
        self._ends: list[float] = []

    def begin(self) -> None:
        """A step begins: its batch is loaded."""
        self._began = time.perf_counter()

    def done(self) -> None:
        """A step is done."""
        now = time.perf_counter()
        self._first_step = self._first_step or time.time()
        self._ends.append(now)
        if self._began is not None:
            self._steps.append(now - self._began)

    def report(self, **more: float) -> None:
        """Print one JSON line, with ``more`` in it.

        ``first_step``: Unix time, seconds. ``step_s``: median seconds from the batch in hand to the parameters
        stepped. ``loop_s``: median seconds from one step's end to the next, data loading included. ``mean_s``: their
        mean.
        """
        loops = [late - early for early, late in zip(self._ends[:-1], self._ends[1:], strict=True)]
        line = {
            "first_step": self._first_step,
            "step_s": _median(self._steps[WARM_UP:]),
            "loop_s": _median(loops[WARM_UP:]),
            "mean_s": statistics.fmean(loops[WARM_UP:]) if loops[WARM_UP:] else None,
            **more,
        }
        print(json.dumps(line), flush=True)


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None
