"""What ``fit`` shows of a run: progress on a terminal, a line in a notebook, elsewhere warnings in the log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, final

from rich.text import Text

from phalanx.errors import SpecError
from phalanx.events.following import Event, Follower, Viewer
from phalanx.report.progress import Lines, StepPace, line_of, progress, step_text
from phalanx.report.tables import PlainConsole

Watch = Callable[[], None] | Literal[False] | None
"""Called about ten times a second; ``False``: nobody looks on; ``None``: whatever suits where the output goes."""

_log = logging.getLogger("phalanx")


@contextmanager
def looked_on(watch: Watch, log: Path) -> Iterator[Callable[[], None] | None]:
    """What is to be called about ten times a second for ``watch``; within, a run writes ``log``.

    Raises:
        SpecError: ``watch`` is something else.
    """
    if watch is not None and watch is not False and not callable(watch):
        raise SpecError.of("watch", repr(watch), "a function, False for nothing, or None", "watch=False")
    if watch is False or isinstance(watch, Follower):
        yield watch or None
        return
    with Follower(log, [_usual() if watch is None else LoggedWarnings()]) as follower:

        def look() -> None:
            follower()
            if watch:
                watch()

        yield look


@contextmanager
def logged(log: Path) -> Iterator[Callable[[], None]]:
    """As ``looked_on``, for a run in the background: what is wrong with it goes to the logger ``phalanx``."""
    with Follower(log, [LoggedWarnings()]) as follower:
        yield follower


def viewers_of_worker(watch: Watch) -> list[Viewer]:
    """What shows a run in a worker of torchrun, whose output is that of all ranks: a line every few seconds.

    ``watch`` is never called there; where it is a function, the logger ``phalanx`` is told what is wrong.
    """
    if watch is False:
        return []
    return [Lines(PlainConsole(stderr=True)) if watch is None else LoggedWarnings()]


def _usual() -> Viewer:
    """What shows a run where this process's output goes."""
    if (display := _notebook()) is not None:
        return NotebookLine(display)
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    return progress(PlainConsole(stderr=True)) if on_terminal else LoggedWarnings()


def _notebook() -> Any:
    """IPython's ``display`` where a notebook's kernel runs this process; ``None`` elsewhere."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None:
        return None
    return import_module("IPython.display").display


@final
class LoggedWarnings(Viewer):
    """Where nobody looks: what differs from one device and what else is wrong goes to the logger ``phalanx``."""

    def event(self, event: Event) -> None:
        differs = [f"differs from one device: {note}" for note in event["notes"]] if event["event"] == "start" else []
        for one in [event["message"]] if event["event"] == "warning" else differs:
            _log.warning("%s", one)


@final
class NotebookLine(Viewer):
    """One line that changes as the run goes on; what is worth a line of its own is printed above."""

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None
        self._pace, self._total = StepPace(), None
        self._text = self._shown = ""

    def event(self, event: Event) -> None:
        if event["event"] == "start":
            self._total = event["total_steps"]
        elif event["event"] == "step":
            self._pace.add(event)
            of = f"/{self._total:,}" if self._total else ""
            self._text = f"step {event['step'] + 1:,}{of}  {step_text(event, self._pace, self._total)}"
        if event["event"] not in ("checkpoint", "end") and (line := line_of(event)):
            print(Text.from_markup(line).plain, flush=True)

    def tick(self) -> None:
        if self._text == self._shown:
            return
        self._shown = self._text
        shown = {"text/plain": self._text, "text/html": f"<pre>{escape(self._text)}</pre>"}
        if self._handle is None:
            self._handle = self._display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)

    def close(self) -> None:
        self.tick()
