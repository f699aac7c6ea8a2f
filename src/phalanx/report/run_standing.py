"""The state of a run that another process, or another machine, trains: as its target and its own log tell it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.config.run_files import RUN_TOML
from phalanx.errors import PhalanxError, RunError, SpecError
from phalanx.events import RunLog
from phalanx.events.log import Event, last_failure, outcome_of
from phalanx.files import Writer, is_written, writer_of
from phalanx.launch.targets.handed_over import UnmarkedError, is_handed_over, ticket_of
from phalanx.launch.targets.target import Standing

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStanding:
    """The state of one run; empty or ``None``: not known yet.

    Attributes:
        state: ``waiting`` in a queue, ``running``, ``ended``, ``stopped``, ``failed`` or ``unknown``.
        detail: words of the target, or the run's last error.
        to: the target; empty for a run of ``phalanx train``.
        step: the last in the log, from 0.
        checkpoint: name of the newest, by the log.
    """

    folder: str
    state: str
    detail: str
    to: str
    plan: str
    step: int | None
    steps: int | None
    loss: float | None
    checkpoint: str

    @property
    def goes_on(self) -> bool:
        """Return True if the run waits or runs."""
        return self.state in ("waiting", "running")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_standing(folder: Path) -> RunStanding:
    """Return the state of the run in ``folder``.

    Raises:
        SpecError: there is neither a run nor a launch in the folder.
    """
    launched, standing = None, None
    try:
        launched = _ticket(folder)
        if launched:
            standing = launched[0].standing(launched[1], folder)
    except UnmarkedError as error:  # its target is not asked
        standing = Standing(state="unknown", detail=error.problems[0].given)
    written = is_written(folder)
    events = _events(folder)  # read later: once the lock is free, the log has its end
    state, detail = ("running", "") if written else _by_log(folder, events)
    if standing:
        events = events or list(standing.events)
        if standing.state != "unknown":
            state, detail = standing.state, standing.detail or detail
        elif standing.detail:
            detail = "; ".join(part for part in (detail, standing.detail) if part)
    elif not launched and not events and not (folder / RUN_TOML).exists():
        if not (state == "running" or (folder / "launch").is_dir()):
            raise SpecError.of("RUN", f"{folder}, in which there is no run", "a run folder", f"ls {folder}")
        detail = "it has not begun" if state == "running" else f"{detail}; phalanx logs {folder}"
    last: dict[str, Any] = {event["event"]: event for event in events}
    start, step, saved = (last.get(name, {}) for name in ("start", "step", "checkpoint"))
    return RunStanding(
        folder=str(folder),
        state=state,
        detail=detail,
        to=launched[1]["to"] if launched else "",
        plan=start.get("plan", ""),
        step=step.get("step"),
        steps=start.get("total_steps"),
        loss=step.get("loss"),
        checkpoint=Path(saved.get("path", "")).name,
    )


def standing_table(found: RunStanding) -> Table:
    """Return the state as a table."""
    from phalanx.report.render import facts

    rows = {
        "run": found.folder,
        "state": f"{found.state}: {found.detail}" if found.detail else found.state,
        "handed to": found.to,
        "plan": found.plan,
        "steps": "" if found.step is None else f"{found.step + 1} of {found.steps or '?'}",
        "loss": "" if found.loss is None else f"{found.loss:.6g}",
        "checkpoint": found.checkpoint,
    }
    return facts(rows)


def stop_run(folder: Path) -> bool:
    """Ask the run in ``folder`` to save and stop; return at once, True if there was a run to ask.

    Raises:
        RunError: it runs on another machine without a target, or its process cannot be signalled.
    """
    try:
        launched = _ticket(folder)
    except UnmarkedError:
        launched = None
        if not is_written(folder):
            raise
    if launched:
        found = run_standing(folder)
        if found.goes_on or found.state == "unknown":  # a target that cannot be asked says so
            launched[0].stop(launched[1], folder)
        return found.goes_on
    writer = writer_of(folder)
    if writer is None:
        return False
    if writer.host != socket.gethostname():  # its lock cannot be seen from here
        if outcome_of(_events(folder)) not in ("unknown", ""):
            return False
        way = f"ssh -- {shlex.quote(writer.host)} kill -TERM {writer.pid}"
        raise RunError(f"{folder} is written by {_elsewhere(writer)}\n    try: {way}")
    holds = _holds(folder, writer.pid)
    if not is_written(folder):
        return False
    if not holds:
        wrong = f"{folder} names process {writer.pid} as who writes it, which does not hold its lock"
        raise RunError(f"{wrong}\n    try: fuser -v {shlex.quote(str(folder))}/writer.json, which says who does")
    try:
        os.kill(writer.pid, signal.SIGTERM)
    except ProcessLookupError:
        return False
    except PermissionError:
        raise RunError(f"process {writer.pid}, which trains in {folder}, is another user's\n    try: sudo") from None
    return True


def _holds(folder: Path, pid: int) -> bool:
    """Return True if the kernel lists process ``pid`` as holder of the lock of ``folder``."""
    with suppress(OSError):
        number = (folder / "writer.json").lstat().st_ino
        return re.search(rf" WRITE {pid} \S+:{number} ", Path("/proc/locks").read_text()) is not None
    return False


def ranks_of(folder: Path) -> int | None:
    """Return the number of ranks of the run in ``folder``, by its log; ``None`` before it has begun."""
    return next((event["world_size"] for event in _events(folder)), None)


def _events(folder: Path) -> Sequence[Event]:
    with suppress(PhalanxError, OSError):
        return RunLog(folder).part
    return ()


def _ticket(folder: Path) -> Any:
    return ticket_of(folder) if is_handed_over(folder) else None


def _by_log(folder: Path, events: Sequence[Event]) -> tuple[str, str]:
    """Return state and detail by the log of a run that no process wrote when it was looked at."""
    state = outcome_of(events)
    if state not in ("unknown", ""):
        return state, str(last_failure(events).get("message", "")) if state == "failed" else ""
    if is_written(folder):  # it has begun meanwhile
        return "running", ""
    writer = writer_of(folder)
    if writer and writer.host != socket.gethostname():
        return "unknown", f"written by {_elsewhere(writer)}"
    return "unknown", "its log has no end" if state else "it has not begun"


def _elsewhere(writer: Writer) -> str:
    return f"process {writer.pid} on {writer.host}, which is not this machine"
