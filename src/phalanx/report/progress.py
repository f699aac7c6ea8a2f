"""Progress of a run in a terminal: a bar, or a line every few seconds, with lines of other events above it."""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, Self, final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from phalanx.events.following import Event, Viewer
from phalanx.units import show_bytes, show_clock, show_count, show_counted, show_seconds

WAITED_MUCH = 0.1  # the share of the time from which on waiting for data is shown
_WINDOW = 30  # steps of the shown pace
_LINE_EVERY = 5.0  # seconds between lines without a terminal
# events with a line of their own
ALL = frozenset("start check resume evaluate checkpoint warning ended_early stopped restart resize".split())


def progress(console: Console, *, label: str = "", lines: frozenset[str] = ALL) -> Viewer:
    """Return a viewer on ``console``: a bar on a terminal, else a line every few seconds.

    ``label`` precedes it, such as the plan; ``lines`` are the events with a line of their own.
    """
    return Bar(console, label, lines) if console.is_terminal else Lines(console, label, lines)


def same_terminal() -> bool:
    """Return True if output of workers on stdout would tear the bar, and has to go above it."""
    return sys.stdout is not None and sys.stdout.isatty()


@final
class StepPace:
    """The pace of the last few steps."""

    def __init__(self) -> None:
        self._steps: deque[Event] = deque(maxlen=_WINDOW)

    def add(self, event: Event) -> None:
        """Take in a ``step`` event."""
        self._steps.append(event)

    @property
    def samples_per_second(self) -> float | None:
        seconds = sum(one["seconds"] for one in self._steps)
        return sum(one["samples"] for one in self._steps) / seconds if seconds > 0 else None

    @property
    def waited(self) -> float:
        """The share of the time in which rank 0 waited for data; 0 if it is not known."""
        return waited_share(self._steps) or 0.0

    def seconds_for(self, steps: int) -> float | None:
        """Return the time of so many more steps, with the evaluations between them; ``None`` before two steps."""
        if len(self._steps) < 2:
            return None
        first, last = self._steps[0], self._steps[-1]
        return (last["time"] - first["time"]) / max(1, last["step"] - first["step"]) * steps


def waited_share(steps: Iterable[Event]) -> float | None:
    """Return the share of the time of ``step`` events in which rank 0 waited for data; ``None`` if not known."""
    known = [event for event in steps if event.get("waited") is not None]
    seconds = sum(event["seconds"] for event in known)
    return min(1.0, sum(event["waited"] for event in known) / seconds) if seconds > 0 else None


def step_text(event: Event, pace: StepPace, total: int | None) -> str:
    """Return loss, pace, learning rate and time left, of a ``step`` event."""
    parts = [_number("loss", event["loss"])]
    if (rate := pace.samples_per_second) is not None:
        parts.append(f"{show_count(rate)} samples/s")
    parts.append(f"lr {event['lr']:.3g}")
    if pace.waited >= WAITED_MUCH:
        parts.append(f"waiting for data {pace.waited:.0%}")
    left = total - event["step"] - 1 if total else 0
    if left and (seconds := pace.seconds_for(left)) is not None:
        parts.append(f"{show_clock(seconds)} left")
    return "  ".join(parts)


def result_text(evaluation: Event) -> str:
    """Return loss and metrics of an evaluation."""
    values = {"loss": evaluation["loss"], **evaluation["metrics"]}
    return "  ".join(_number(name, value) for name, value in values.items())


def _number(name: str, value: float | None) -> str:
    return f"{name} NaN" if value is None else f"{name} {value:.4g}"


def damages(event: Event) -> bool:
    """Return True if the event reports a damaged checkpoint; its message begins with the checkpoint's name."""
    return event["event"] == "warning" and re.match(r"step-\d+ is damaged: ", event["message"]) is not None


def line_of(event: Event) -> str | None:
    """Return the line of an event, with rich's markup; ``None`` if it has none."""
    match event["event"]:
        case "start":
            return "\n".join(f"[yellow]differs from one device:[/] {escape(note)}" for note in event["notes"]) or None
        case "resume":
            return f"goes on from step {event['step']} [dim]({escape(event['path'])})[/]"
        case "evaluate":
            return f"[dim]step {event['step']:>5}[/]  evaluation  {escape(result_text(event))}"
        case "checkpoint":
            size, seconds = show_bytes(event["bytes"]), show_seconds(event["seconds"])
            return f"[dim]step {event['step']:>5}  checkpoint  {escape(event['path'])}  {size} in {seconds}[/]"
        case "resize" | "restart":
            what, _, why = interruption_text(event).partition(": ")
            return f"[yellow]{what}[/]: {escape(why)}"
        case "stopped":
            return f"[yellow]stopped[/] after {event['step']} steps, by {event['signal']}"
        case "ended_early":
            since, metric = f"in {show_counted(event['evaluations'], 'evaluation')}", escape(event["metric"])
            best = f"no better {metric} than {event['value'] or 0.0:.4g}, of step {event['best']}, {since}"
            why = f"no {metric} that is a number {since}" if event["best"] is None else best
            return f"[yellow]ended early[/] after {event['step']} steps: {why}"
        case "warning" | "check":
            said = event["event"] == "check" and event["equal"] is not False
            return ("" if said else "[yellow]warning:[/] ") + escape(event["message"])
        case _:
            return None


def interruption_text(event: Event) -> str:
    """Return the change and its cause, of a ``restart`` or ``resize`` event."""
    if event["event"] == "resize":
        devices = f"{show_counted(event['to'], 'device')} instead of {event['from']}"
        return f"goes on with {devices} from step {event['step']}: {event['cause']}"
    source = f"; {event['source']}" if "source" in event else ""
    return f"started again ({event['restarts']}): {event['cause']}{source}"


class StepViewer(Viewer):
    """Base of viewers that show the newest step, and lines of other events above it."""

    def __init__(self, label: str, lines: frozenset[str]) -> None:
        self._label, self._lines = label, lines
        self._pace = StepPace()
        self._total: int | None = None
        self._latest: Event = {}

    def event(self, event: Event) -> None:
        if event["event"] == "start":
            self._total = event["total_steps"]
        elif event["event"] == "step":
            self._pace.add(event)
            self._latest = event
        if event["event"] in self._lines and (line := line_of(event)):
            self._say(line)

    def _say(self, line: str) -> None:
        raise NotImplementedError

    def _text(self) -> str:
        of = f"/{self._total}" if self._total else ""
        text = step_text(self._latest, self._pace, self._total)
        return f"{self._label}{'  ' * bool(self._label)}step {self._latest['step'] + 1:>5}{of}  {text}"


@final
class Bar(StepViewer):
    """A progress bar. Only ``tick`` draws it: a drawing thread must not be there when workers are forked."""

    def __init__(self, console: Console, label: str = "", lines: frozenset[str] = ALL) -> None:
        super().__init__(label, lines)
        columns = [BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}")]
        self._progress = _progress(console, *([TextColumn(escape(label))] if label else []), *columns)
        self._task = self._progress.add_task("starting", total=None)
        self._started = False

    def event(self, event: Event) -> None:
        super().event(event)
        if event["event"] == "start":
            self._progress.update(self._task, total=self._total, completed=event["first_step"])
        elif event["event"] == "step":
            text = step_text(event, self._pace, self._total)
            self._progress.update(self._task, completed=event["step"] + 1, description=text)
        elif event["event"] == "end" and self._total is None:
            self._progress.update(self._task, total=event["step"])

    def _say(self, line: str) -> None:
        self._progress.console.print(line, highlight=False)

    def tick(self) -> None:
        if not self._started:
            self._progress.start()
            self._started = True
        self._progress.refresh()

    def close(self) -> None:
        if self._started:
            self._progress.stop()


def _progress(console: Console, *columns: Any, transient: bool = False) -> Progress:
    spinner, above = SpinnerColumn(finished_text="[green]✓"), same_terminal()
    return Progress(spinner, *columns, console=console, auto_refresh=False, transient=transient, redirect_stdout=above)


@final
class Lines(StepViewer):
    """Text for a file or a pipe: the first step, the last, and one every few seconds."""

    def __init__(self, console: Console, label: str = "", lines: frozenset[str] = ALL) -> None:
        super().__init__(label, lines)
        self._console, self._said_at = console, 0.0

    def event(self, event: Event) -> None:
        super().event(event)
        if event["event"] == "end" or (event["event"] == "step" and event["step"] + 1 == self._total):
            self._show()

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)

    def tick(self) -> None:
        if time.monotonic() - self._said_at >= _LINE_EVERY:
            self._show()

    def _show(self) -> None:
        if self._latest:
            self._console.print(self._text(), highlight=False, soft_wrap=True)
            self._said_at, self._latest = time.monotonic(), {}


@final
class Damages(Viewer):
    """Damaged checkpoints alone, of a run that is to be quiet."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def event(self, event: Event) -> None:
        if damages(event):
            self._console.print(line_of(event), highlight=False)


@final
class Opening(Viewer):
    """A text, shown once workers have been started: a run that is refused before has nothing to show."""

    def __init__(self, console: Console, text: str) -> None:
        self._console, self._text = console, text

    def tick(self) -> None:
        if self._text:
            self._console.print(self._text, highlight=False, markup=False, soft_wrap=True)
        self._text = ""


@final
class Waiting:
    """A line with the time that work without events has taken. A call redraws it."""

    def __init__(self, console: Console, what: str) -> None:
        self._console, self._what = console, what
        self._progress = _progress(console, TextColumn("{task.description}"), TimeElapsedColumn(), transient=True)

    def __call__(self) -> None:
        if self._console.is_terminal:
            self._progress.start()
            self._progress.refresh()

    def __enter__(self) -> Self:
        self._progress.add_task(escape(self._what), total=None)
        if not self._console.is_terminal:
            self._console.print(self._what, highlight=False, markup=False)
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._progress.stop()
