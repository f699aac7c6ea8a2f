"""How a run stands that another process, or another machine, trains: by its target's word and by its own log."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.config.run_files import RUN_TOML
from phalanx.errors import PhalanxError, RunError, SpecError
from phalanx.files import Writer, is_written, writer_of
from phalanx.launch.targets.handed_over import UnmarkedError, is_handed_over, ticket_of
from phalanx.launch.targets.target import Standing
from phalanx.report.summary import run_log

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStanding:
    """One run.

    Attributes:
        state: ``waiting`` in a queue, ``running``, ``ended``, ``stopped``, ``failed``; ``unknown`` where nothing tells.
        detail: what the target, or the run's last error, says.
        to: where it was handed to; empty for a run of ``phalanx train``.
        plan: by which it trains; empty before it has begun.
        step: of the last step in its log, from 0; ``None`` before the first.
        steps: that it is to take; ``None`` before it has begun.
        loss: of that step.
        checkpoint: the name of the newest, as its log has it.
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
        """Return True if there is more to come of it."""
        return self.state in ("waiting", "running")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_standing(folder: Path) -> RunStanding:
    """How the run in ``folder`` stands.

    Raises:
        SpecError: there is neither a run nor a launch in the folder.
    """
    launched, standing = None, None
    try:
        launched = _ticket(folder)
        if launched:
            standing = launched[0].standing(launched[1], folder)
    except UnmarkedError as error:  # nobody is asked
        standing = Standing(state="unknown", detail=error.problems[0].given)
    written = is_written(folder)
    events = _events(folder)  # later: a run that nobody writes any more has written its end
    state, detail = ("running", "") if written else _by_log(folder, events)
    if standing:
        events = events or [dict(event) for event in standing.events]
        if standing.state != "unknown":
            state, detail = standing.state, standing.detail or detail
        elif standing.detail:  # beside what the run's own log tells
            detail = "; ".join(part for part in (detail, standing.detail) if part)
    elif not launched and not events and not (folder / RUN_TOML).exists():
        if not (state == "running" or (folder / "launch").is_dir()):
            raise SpecError.of("RUN", f"{folder}, in which there is no run", "a run folder", f"ls {folder}")
        detail = "it has not begun" if state == "running" else f"{detail}; phalanx logs {folder}"
    begun = next((event for event in reversed(events) if event["event"] == "start"), {})
    steps = [event for event in events if event["event"] == "step"]
    saved = [event for event in events if event["event"] == "checkpoint"]
    return RunStanding(
        folder=str(folder),
        state=state,
        detail=detail,
        to=launched[1]["to"] if launched else "",
        plan=begun.get("plan", ""),
        step=steps[-1]["step"] if steps else None,
        steps=begun.get("total_steps"),  # pyrefly: ignore[bad-argument-type]
        loss=steps[-1].get("loss") if steps else None,
        checkpoint=Path(saved[-1]["path"]).name if saved else "",
    )


def standing_table(found: RunStanding) -> Table:
    """The same for people."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    rows = {
        "run": found.folder,
        "state": f"{found.state}: {found.detail}" if found.detail else found.state,
        "handed to": found.to,
        "plan": found.plan,
        "steps": "" if found.step is None else f"{found.step + 1} of {found.steps or '?'}",
        "loss": "" if found.loss is None else f"{found.loss:.6g}",
        "checkpoint": found.checkpoint,
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, Text(value))  # no markup: it may be a stranger's
    return table


def stop_run(folder: Path) -> bool:
    """Have the run in ``folder`` save and stop; returns at once. Returns whether there was one to ask.

    Raises:
        RunError: it goes on on another machine, and no target leads there.
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
    if writer.host != socket.gethostname():  # whose locks are not seen here
        if _last_word(_events(folder)):
            return False
        way = f"ssh -- {shlex.quote(writer.host)} kill -TERM {writer.pid}"
        raise RunError(f"{folder} is written by {_elsewhere(writer)}\n    try: {way}")
    holds = _holds(folder, writer.pid)
    if not is_written(folder):
        return False
    if not holds:
        what = f"{folder} names process {writer.pid} as who writes it, which does not hold its lock"
        raise RunError(f"{what}\n    try: fuser -v {shlex.quote(str(folder))}/writer.json, which says who does")
    try:
        os.kill(writer.pid, signal.SIGTERM)
    except ProcessLookupError:
        return False
    except PermissionError:
        raise RunError(f"process {writer.pid}, which trains in {folder}, is another user's\n    try: sudo") from None
    return True


def _holds(folder: Path, pid: int) -> bool:
    """Return whether the kernel says that process ``pid`` holds the lock of ``folder``."""
    with suppress(OSError):
        number = (folder / "writer.json").lstat().st_ino
        return re.search(rf" WRITE {pid} \S+:{number} ", Path("/proc/locks").read_text()) is not None
    return False


def ranks_of(folder: Path) -> int | None:
    """How many ranks the run in ``folder`` has, by its log; ``None`` before it has begun."""
    return next((event["world_size"] for event in reversed(_events(folder)) if event["event"] == "start"), None)


def _events(folder: Path) -> list[dict[str, Any]]:
    with suppress(PhalanxError, OSError):
        return [dict(event) for event in run_log(folder).part]
    return []


def _ticket(folder: Path) -> Any:
    return ticket_of(folder) if is_handed_over(folder) else None


def _by_log(folder: Path, events: list[dict[str, Any]]) -> tuple[str, str]:
    """State and detail as the log of a run tells them that nobody wrote when it was looked at."""
    last = _last_word(events)
    if last is None:
        if is_written(folder):  # it has begun meanwhile
            return "running", ""
        writer = writer_of(folder)
        if writer and writer.host != socket.gethostname():
            return "unknown", f"written by {_elsewhere(writer)}"
        return "unknown", "its log has no end" if events else "it has not begun"
    if last["event"] == "error":
        return "failed", str(last.get("message", ""))
    return ("ended" if last["event"] == "end" else "stopped"), ""


def _last_word(events: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The event that says how the run ended; ``None`` where none does."""
    return next((event for event in reversed(events) if event["event"] in ("end", "error", "stopped")), None)


def _elsewhere(writer: Writer) -> str:
    return f"process {writer.pid} on {writer.host}, which is not this machine"
