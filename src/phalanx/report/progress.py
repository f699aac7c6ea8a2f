"""A run followed in the terminal while it goes on: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from collections.abc import Iterable
from typing import Self, final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from phalanx.events.following import Event, Viewer
from phalanx.units import show_bytes, show_clock, show_count, show_seconds

_WINDOW = 30  # steps that the shown pace is taken over
_LINE_EVERY = 5.0  # seconds between lines where there is no terminal
# events that get a line of their own
ALL = frozenset("start check resume evaluate checkpoint warning ended_early stopped restart resize".split())


def progress(console: Console, *, label: str = "", lines: frozenset[str] = ALL) -> Viewer:
    """What shows a run on ``console``: a bar where it is a terminal, else a line every few seconds.

    ``label`` stands before it, such as the plan; ``lines`` are the events that get a line of their own besides.
    """
    return Bar(console, label, lines) if console.is_terminal else Lines(console, label, lines)


def damages(event: Event) -> bool:
    """Return True if the event says that a checkpoint is damaged; its message begins with the checkpoint's name."""
    return event["event"] == "warning" and re.match(r"step-\d+ is damaged: ", event["message"]) is not None


@final
class Damages(Viewer):
    """Of a run that is to be quiet: only what was found damaged, which nobody should miss."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def event(self, event: Event) -> None:
        if damages(event):
            self._console.print(line_of(event), highlight=False)


@final
class StepPace:
    """How fast steps go by, taken over the last few."""

    def __init__(self) -> None:
        self._steps: deque[Event] = deque(maxlen=_WINDOW)

    def add(self, event: Event) -> None:
        """Take in a ``step`` event."""
        self._steps.append(event)

    @property
    def samples_per_second(self) -> float | None:
        """``None`` before the first step."""
        seconds = sum(one["seconds"] for one in self._steps)
        return sum(one["samples"] for one in self._steps) / seconds if seconds > 0 else None

    @property
    def waited(self) -> float:
        """The share of the time in which rank 0 waited for data; 0 where it is not known."""
        return waited_share(self._steps) or 0.0

    def seconds_for(self, steps: int) -> float | None:
        """Time that so many more steps will take, with the evaluations between them; ``None`` before two steps."""
        if len(self._steps) < 2:
            return None
        first, last = self._steps[0], self._steps[-1]
        return (last["time"] - first["time"]) / max(1, last["step"] - first["step"]) * steps


WAITED_MUCH = 0.1  # the share of the time from which on waiting for data is worth a word


def waited_share(steps: Iterable[Event]) -> float | None:
    """The share of their time in which rank 0 waited for data, of ``step`` events; ``None`` where none tells."""
    known = [event for event in steps if event.get("waited") is not None]
    seconds = sum(event["seconds"] for event in known)
    return min(1.0, sum(event["waited"] for event in known) / seconds) if seconds > 0 else None


def step_text(event: Event, pace: StepPace, total: int | None) -> str:
    """Loss, pace, learning rate and time left, as of a ``step`` event."""
    parts = [f"loss {event['loss']:.4g}" if event["loss"] is not None else "loss NaN"]
    if (rate := pace.samples_per_second) is not None:
        parts.append(f"{show_count(rate)} samples/s")
    parts.append(f"lr {event['lr']:.3g}")
    if pace.waited >= WAITED_MUCH:
        parts.append(f"waiting for data {pace.waited:.0%}")
    left = total - event["step"] - 1 if total else 0
    if left and (seconds := pace.seconds_for(left)) is not None:
        parts.append(f"{show_clock(seconds)} left")
    return "  ".join(parts)


def line_of(event: Event) -> str | None:
    """One line for an event that is worth one, with rich's markup; ``None`` for others."""
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
            return f"[yellow]ended early[/] after {event['step']} steps: {escape(early_text(event))}"
        case "warning" | "check":
            said = event["event"] == "check" and event["equal"] is not False
            return ("" if said else "[yellow]warning:[/] ") + escape(event["message"])
        case _:
            return None


def early_text(event: Event) -> str:
    """Why the run ended early, as of an ``ended_early`` event."""
    since = f"in {event['evaluations']} evaluation{'s' if event['evaluations'] > 1 else ''}"
    if event["best"] is None:
        return f"no {event['metric']} that is a number {since}"
    return f"no better {event['metric']} than {event['value']:.4g}, of step {event['best']}, {since}"


def interruption_text(event: Event) -> str:
    """What came between, and why, as of a ``restart`` or ``resize`` event."""
    if event["event"] == "resize":
        devices = f"{event['to']} device{'s' if event['to'] > 1 else ''} instead of {event['from']}"
        return f"goes on with {devices} from step {event['step']}: {event['cause']}"
    source = f"; {event['source']}" if "source" in event else ""
    return f"started again ({event['restarts']}): {event['cause']}{source}"


def result_text(evaluation: Event) -> str:
    """Loss and metrics of an evaluation."""
    values = {"loss": evaluation["loss"], **evaluation["metrics"]}
    return "  ".join(f"{name} {value:.4g}" if value is not None else f"{name} NaN" for name, value in values.items())


@final
class Opening(Viewer):
    """Says something once, as soon as workers have been started: what is refused before that has nothing to show."""

    def __init__(self, console: Console, text: str) -> None:
        self._console, self._text = console, text

    def tick(self) -> None:
        if self._text:
            self._console.print(self._text, highlight=False, markup=False, soft_wrap=True)
        self._text = ""


@final
class Bar(Viewer):
    """A progress bar. It is drawn by ``tick`` alone: a drawing thread would be there when workers are forked."""

    def __init__(self, console: Console, label: str = "", lines: frozenset[str] = ALL) -> None:
        self._lines = lines
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            *([TextColumn("{task.fields[label]}")] if label else []),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            console=console,
            auto_refresh=False,
            redirect_stdout=_same_terminal(),
        )
        self._task = self._progress.add_task("starting", total=None, label=escape(label))
        self._pace = StepPace()
        self._total: int | None = None
        self._started = False

    def event(self, event: Event) -> None:
        if event["event"] == "start":
            self._total = event["total_steps"]
            self._progress.update(self._task, total=self._total, completed=event["first_step"])
        elif event["event"] == "step":
            self._pace.add(event)
            text = step_text(event, self._pace, self._total)
            self._progress.update(self._task, completed=event["step"] + 1, description=text)
        elif event["event"] == "end" and self._total is None:
            self._progress.update(self._task, total=event["step"])
        if event["event"] in self._lines and (line := line_of(event)):
            self._progress.console.print(line, highlight=False)

    def tick(self) -> None:
        if not self._started:
            self._progress.start()
            self._started = True
        self._progress.refresh()

    def close(self) -> None:
        if self._started:
            self._progress.stop()


@final
class Waiting:
    """A line that says what is going on and for how long, for work that writes no events. Calling it redraws it."""

    def __init__(self, console: Console, what: str) -> None:
        self._console, self._what = console, what
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=_same_terminal(),
        )

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


@final
class Lines(Viewer):
    """The same as text, for a file or a pipe: the first step, the last, and one every few seconds."""

    def __init__(self, console: Console, label: str = "", lines: frozenset[str] = ALL) -> None:
        self._console, self._lines = console, lines
        self._label = f"{label}  " if label else ""
        self._pace = StepPace()
        self._total: int | None = None
        self._said_at = 0.0
        self._latest: Event | None = None

    def event(self, event: Event) -> None:
        if event["event"] == "start":
            self._total = event["total_steps"]
        elif event["event"] == "step":
            self._pace.add(event)
            self._latest = event
            if event["step"] + 1 == self._total:
                self._say()
        elif event["event"] == "end":
            self._say()
        if event["event"] in self._lines and (line := line_of(event)):
            self._console.print(line, highlight=False, soft_wrap=True)

    def tick(self) -> None:
        if time.monotonic() - self._said_at >= _LINE_EVERY:
            self._say()

    def _say(self) -> None:
        event, self._latest = self._latest, None
        if event is None:
            return
        of = f"/{self._total}" if self._total else ""
        text = step_text(event, self._pace, self._total)
        self._console.print(f"{self._label}step {event['step'] + 1:>5}{of}  {text}", highlight=False, soft_wrap=True)
        self._said_at = time.monotonic()


def _same_terminal() -> bool:
    """Return True if what workers print to stdout would tear the bar, and so has to go above it."""
    return sys.stdout is not None and sys.stdout.isatty()
