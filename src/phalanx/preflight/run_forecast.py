"""A run's forecast, worked out beside its workers: whether it fits, and which part ran out where it did not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, final

from phalanx.config import Job, RunSpec
from phalanx.config.run_files import EVENTS
from phalanx.errors import Problem, RefusedError, RunError, WorkerError, is_out_of_memory
from phalanx.events import EventLog, RunLog
from phalanx.files import check_writer, replace_text
from phalanx.launch.side_process import Afterwards, SideProcess
from phalanx.preflight.machine_forecast import send_forecast
from phalanx.report.comparison import FORECAST, LATE, memory_beside, stored, under_forecast
from phalanx.units import show_bytes

PATIENCE = 0.1
"""Share of its time that a run's end waits for its forecast."""
_LONGEST = 60.0  # seconds that the begin of a run waits, where its model alone is large


def forecast_after_look(job: Job, run: RunSpec, threads: int | None = None) -> Afterwards | None:
    """What makes the forecast of ``run`` once its job has been looked at; ``None`` where none is wanted.

    ``threads``: that each replica computes with.
    """
    return None if run.forecast == "none" else lambda look, send: send_forecast(job, run.plan, threads, look, send)


@final
class RunForecaster:
    """The forecast of one run.

    As a context it surrounds the run: entering waits until the run may begin, leaving stores what was found. Called, it
    takes in what was found since, as ``watch`` of a launch.
    """

    def __init__(self, run: RunSpec, side: SideProcess | None, watch: Callable[[], None] | None) -> None:
        """``side``: the process that goes on from its look as ``forecast_after_look`` says, or would.

        ``watch``: called by each call, too.
        """
        self._run, self._watch = run, watch
        self._side = None if run.forecast == "none" else side
        self._log = run.folder / EVENTS
        self._said: dict[str, Any] | None = None
        self._logged = False
        self._began = time.monotonic()
        self._size = 0

    def __enter__(self) -> Self:
        """Wait until the run may begin.

        Raises:
            RefusedError: if the forecast is there already, and it does not fit.
        """
        try:
            self._hear(_LONGEST)
        except BaseException:
            self._end()
            raise
        self._began = time.monotonic()
        self._size = self._log.stat().st_size if self._log.exists() else 0
        return self

    def __call__(self) -> None:
        """Take in what was found.

        Raises:
            RefusedError: if the plan is forecast not to fit.
        """
        if self._said is None:
            self._hear(0.0)
        self._write()
        if self._watch:
            self._watch()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._said is None and self._side and (kind is None or issubclass(kind, Exception)):
                self._take(self._next(PATIENCE * (time.monotonic() - self._began)))
            if self._side and self._run.folder.is_dir() and (self._said or not stored(self._run.folder)):
                told = self._said or {"missing": LATE}
                with suppress(
                    OSError, RunError
                ):  # a full disk, or another writer, is not what a run's end is to be about
                    check_writer(self._run.folder)
                    replace_text(self._run.folder / FORECAST, json.dumps(told, indent=2) + "\n")
        finally:
            self._end()

    @property
    def forecast(self) -> dict[str, Any] | None:
        """As JSON; ``None`` where there is none, or not yet."""
        return (self._said or {}).get("forecast")

    def _hear(self, patience: float) -> None:
        if self._side is None:
            return
        heard = self._next(patience)
        if heard and heard.get("light"):
            heard = self._side.next()
        self._take(heard)
        found = self.forecast
        if found and not found["fits"] and self._run.forecast == "refuse":
            raise RefusedError([problem(found, self._said["instead"] if self._said else "")])

    def _next(self, patience: float) -> dict[str, Any] | None:
        assert self._side
        heard = self._side.next(patience)
        return self._side.next(patience) if heard and "look" in heard else heard  # which nobody has waited for

    def _take(self, heard: dict[str, Any] | None) -> None:
        if heard and not heard.get("light"):
            self._said = heard
        elif heard is None and self._side and self._side.done:
            self._said = {"missing": "the process that makes forecasts ended"}

    def _write(self) -> None:
        """The event, once the run's own first one stands in the log."""
        found = self.forecast
        if found is None or self._logged or not self._log.exists() or self._log.stat().st_size <= self._size:
            return
        self._logged = True
        if RunLog(self._run.folder).outcome in ("ended", "stopped"):  # which stays the last
            return
        names = ("cluster", "step", "low", "high", "seconds", "memory", "allocated", "reserved", "room", "fits")
        with EventLog(self._log) as log:
            log.write("forecast", **{name: found[name] for name in names})

    def _end(self) -> None:
        if self._side:
            self._side.close()


def problem(found: dict[str, Any], instead: str) -> Problem:
    """What keeps a plan that is forecast not to fit from being run."""
    part = max(found["memory"], key=lambda name: found["memory"][name])
    return Problem(
        where="plan",
        given=f"{found['plan']}, forecast to need {show_bytes(found['reserved'])} of memory on a device "
        f"({show_bytes(found['memory'][part])} of it {part}): {found['reserved'] - found['room']:,.0f} bytes more than "
        f"the {show_bytes(found['room'])} there are",
        allowed="a plan that fits; or to try all the same",
        fix=instead.replace("--plan ", "plan=") or 'forecast="anyway"',
    )


def too_little(error: WorkerError, folder: Path) -> str | None:
    """What the forecast of the run in ``folder`` says to ``error``; ``None`` where that is not about memory."""
    if not is_out_of_memory(error.kind, str(error)):
        return None
    forecast = (stored(folder) or {}).get("forecast")
    if not forecast:
        return None
    whole = f"the forecast was {show_bytes(forecast['reserved'])} of {show_bytes(forecast['room'])} on each device"
    mine = [event for event in RunLog(folder).named("memory") if event["rank"] == error.rank][-1:]
    rows = memory_beside(forecast, mine)
    if not rows:
        return f"{whole}; nothing was measured before memory ran out"
    worst = under_forecast(rows)
    if worst is None:
        reached = ", ".join(
            f"{one.part} {show_bytes(one.measured or 0)} of {show_bytes(one.forecast or 0)}" for one in rows
        )
        return f"{whole}; no part had grown beyond it when memory ran out ({reached}): something else takes the rest"
    missed = show_bytes((worst.measured or 0.0) - (worst.forecast or 0.0))
    told, held = show_bytes(worst.forecast or 0.0), show_bytes(worst.measured or 0.0)
    return (
        f"{whole}; too small was its part for {worst.part}: {told}, where rank {error.rank} held {held} when memory "
        f"ran out, {missed} more"
    )
