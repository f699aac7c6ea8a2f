"""Viewers of ``fit``: progress on a terminal, a line in a notebook, else warnings in the log of Python; TensorBoard."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from rich.text import Text

from phalanx.errors import MissingExtraError, SpecError
from phalanx.events.following import Event, Follower, Viewer
from phalanx.report.progress import ALL, Lines, StepViewer, progress, same_terminal
from phalanx.report.render import PlainConsole

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Watch = Callable[[], None] | Literal[False] | None
"""A function called about ten times a second; ``False``: show no progress; ``None``: show it as the output allows."""

_log = logging.getLogger("phalanx")


@contextmanager
def looked_on(watch: Watch, log: Path) -> Iterator[Callable[[], None] | None]:
    """Give the function to be called about ten times a second for ``watch``, while a run writes ``log``.

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


def viewers_of_worker(watch: Watch) -> list[Viewer]:
    """Return the viewers in a worker of torchrun, which shares its output with all ranks: a line every few seconds.

    ``watch`` is never called there; if it is a function, warnings go to the logger ``phalanx``.
    """
    if watch is False:
        return []
    return [Lines(PlainConsole(stderr=True)) if watch is None else LoggedWarnings()]


def _usual() -> Viewer:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is not None:
        return NotebookLine(import_module("IPython.display").display)
    return progress(PlainConsole(stderr=True)) if same_terminal() else LoggedWarnings()


@final
class NotebookLine(StepViewer):
    """A line of a notebook that changes with the run; lines of other events are printed above."""

    def __init__(self, display: Any) -> None:
        super().__init__("", ALL - {"checkpoint"})
        self._display = display
        self._handle: Any = None

    def _say(self, line: str) -> None:
        print(Text.from_markup(line).plain, flush=True)

    def tick(self) -> None:
        if not self._latest:
            return
        text, self._latest = self._text(), {}
        shown = {"text/plain": text, "text/html": f"<pre>{escape(text)}</pre>"}
        if self._handle is None:
            self._handle = self._display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)

    def close(self) -> None:
        self.tick()


@final
class LoggedWarnings(Viewer):
    """Warnings, and differences from one device, in the logger ``phalanx``."""

    def event(self, event: Event) -> None:
        differs = [f"differs from one device: {note}" for note in event["notes"]] if event["event"] == "start" else []
        for one in [event["message"]] if event["event"] == "warning" else differs:
            _log.warning("%s", one)


@final
class TensorBoard(Viewer):
    """Losses, learning rates, gradient norms, pace and evaluations as TensorBoard scalars, by step.

    The first event makes the writer: it starts a thread, which must not be there when workers are forked.
    """

    def __init__(self, folder: Path) -> None:
        if find_spec("tensorboard") is None:
            raise MissingExtraError("tensorboard", "tensorboard")
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def event(self, event: Event) -> None:
        match event["event"]:
            case "step":
                scalars = {
                    "train/loss": event["loss"],
                    "train/lr": event["lr"],
                    "train/grad_norm": event["grad_norm"],
                    **{f"train/loss/{phase}": loss for phase, loss in event.get("losses", {}).items()},
                    "speed/samples_per_second": event["samples"] / event["seconds"] if event["seconds"] > 0 else None,
                }
                self._write(scalars, event["step"] + 1)
            case "evaluate":
                values = {"loss": event["loss"], **event["metrics"]}
                self._write({f"evaluation/{name}": value for name, value in values.items()}, event["step"])
            case "start":
                self._open().add_text("plan", event["plan"], event["first_step"])
            case _:
                pass

    def close(self) -> None:
        if self._writer:
            self._writer.close()

    def _write(self, scalars: dict[str, float | None], step: int) -> None:
        for name, value in scalars.items():
            if value is not None:
                self._open().add_scalar(name, value, step)

    def _open(self) -> SummaryWriter:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder))
        return self._writer
