"""The append-only event log of a run, and ``RunLog``, its one reader.

On a full disk events wait in memory, and the run continues. A log may come from a stranger: lines that are no events
are counted and left out.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, final

from phalanx.config.run_files import EVENTS
from phalanx.errors import SpecError
from phalanx.events.schema import understood
from phalanx.files import json_value, open_plain

_KEPT = 1000  # events that wait while the log cannot be written


class EventLog:
    """Appends events to a file, one JSON object a line; a half-written line of a killed run stays a line of its own.

    A file that cannot be written is reported once on stderr. The newest thousand events then wait until it can be
    written again, after an event ``lost`` with the number of older ones.
    """

    def __init__(self, path: Path, *, warns: bool = True) -> None:
        """Open the log; ``warns``: warn on stderr if the file cannot be written.

        Raises:
            SpecError: the file is a link or no regular file.
        """
        self._path, self._warns = path, warns
        self._file = -1
        self._torn = False
        self._waiting: deque[bytes] = deque()
        self._lost = 0
        self._reason = ""
        self._closed = False
        self._open()

    def write(self, event: str, **fields: Any) -> None:
        """Append one event. Numbers JSON does not know (NaN, infinities) become null, at any depth."""
        self._waiting.append(_line(event, fields))
        if not self._hand_on() and len(self._waiting) > _KEPT:
            self._waiting.popleft()
            self._lost += 1

    def _open(self) -> bool:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_plain(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            end = os.fstat(self._file).st_size
            self._torn = end > 0 and os.pread(self._file, 1, end - 1) != b"\n"
        except OSError as error:
            self._fails(error)
            return False
        return True

    def _hand_on(self) -> bool:
        """Write the waiting events; return True if all of them are written."""
        if not self._waiting:
            return True
        if self._file < 0 and (self._closed or not self._open()):
            return False
        try:
            if self._lost:
                self._append(_line("lost", {"events": self._lost, "reason": self._reason}))
                self._lost = 0
            while self._waiting:
                self._append(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            self._fails(error)
            return False
        self._reason = ""  # the next failure is reported again
        return True

    def _append(self, line: bytes) -> None:
        # One call may write a part only: on a network file system, or where the disk fills up just then.
        rest = memoryview(b"\n" + line if self._torn else line)
        while rest:
            written = os.write(self._file, rest)
            self._torn = True
            rest = rest[written:]
        self._torn = False

    def _fails(self, error: OSError) -> None:
        if not self._reason and self._warns:
            said = f"the event log {self._path} cannot be written: {error.strerror}"
            _say(f"warning: {said}. The run goes on; its newest {_KEPT} events are written once that works again.")
        self._reason = str(error.strerror)

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._closed:
            return
        if not self._hand_on() and self._warns:
            many = len(self._waiting) + self._lost
            events = "1 event of the run is" if many == 1 else f"{many} events of the run are"
            _say(f"warning: {events} not in {self._path}: {self._reason}")
        self._closed = True
        if self._file >= 0:
            with suppress(OSError):
                os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class EventReader:
    """Reader of a log that may still grow.

    Attributes:
        skipped: number of whole lines so far that were no events of the schema.
    """

    def __init__(self, path: Path) -> None:
        self.skipped = 0
        self._path = path
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        """Return the events added since the last call, without a line that is not finished.

        Raises:
            SpecError: the file is a link or no regular file.
        """
        try:
            with os.fdopen(open_plain(self._path, os.O_RDONLY), "rb") as file:
                file.seek(self._offset)
                text = file.read()
        except OSError:
            return []
        whole = text.rfind(b"\n") + 1
        self._offset += whole
        lines = [line for line in text[:whole].split(b"\n") if line]
        events = [event for event in map(_event, lines) if event is not None]
        self.skipped += len(lines) - len(events)
        return events


Event = dict[str, Any]
Outcome = Literal["ended", "stopped", "failed", "unknown", ""]
"""State of a run as its log tells it; ``unknown``: the run has begun, and its log has no end; empty: no log."""

_OUTCOMES: Mapping[str, Outcome] = {"end": "ended", "stopped": "stopped", "error": "failed"}


@final
class RunLog:
    """The events of the run in ``folder``, read once, when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = EventReader(folder / EVENTS)

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """All events of the run, in order.

        Raises:
            SpecError: the log is a link or no regular file.
        """
        return tuple(self._reader.new())

    @property
    def skipped(self) -> int:
        """The number of lines that were no events."""
        _ = self.events
        return self._reader.skipped

    def named(self, name: str) -> list[Event]:
        """Return the events of this name."""
        return [event for event in self.events if event["event"] == name]

    @property
    def part(self) -> tuple[Event, ...]:
        """The events since the run was started last; the first is its ``start``.

        Raises:
            SpecError: there is no ``start``.
        """
        starts = [at for at, event in enumerate(self.events) if event["event"] == "start"]
        if not starts:
            allowed = "the folder of a run, which holds its events.jsonl"
            fix = f"phalanx train JOB --run {self.folder}"
            raise SpecError.of("run", f"{self.folder}, which holds no log of a run", allowed, fix)
        return self.events[starts[-1] :]

    @property
    def outcome(self) -> Outcome:
        """The state in which the run ended."""
        with suppress(SpecError):
            return outcome_of(self.events)
        return ""

    def ended_since(self, began: float) -> bool:
        """Return True if the run has ended since the time ``began``, in seconds since 1970."""
        with suppress(SpecError):
            return any(event["time"] >= began for event in self.named("end"))
        return False


def outcome_of(events: Iterable[Mapping[str, Any]]) -> Outcome:
    """Return the state in which the run with these last events ended; an end before a later start does not count."""
    told = [event["event"] for event in events if event["event"] in ("start", "resume", *_OUTCOMES)]
    return _OUTCOMES.get(told[-1], "unknown") if told else ""


def last_failure(events: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the error that ended the run with these last ``events``; empty if no error did since its last start.

    An error of the job's own code wins over a later one of a worker that lost its peer.
    """
    last: Mapping[str, Any] = {}
    for event in events:
        if event["event"] in ("start", "resume") or (event["event"] == "error" and not (_own(last) and _lost(event))):
            last = event
    return last if last.get("event") == "error" else {}


def own_failure(events: Iterable[Mapping[str, Any]]) -> str:
    """Return the error of the job's own code that ended the run with these last ``events``; empty without one.

    The loss of a worker does not count: it may not happen again.
    """
    last = last_failure(events)
    return last["message"] if _own(last) else ""


def _own(event: Mapping[str, Any]) -> bool:
    return event.get("event") == "error" and not _lost(event)


def _lost(event: Mapping[str, Any]) -> bool:
    return bool(event.get("lost", True))


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json_value(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and understood(event) else None


def _line(event: str, fields: dict[str, Any]) -> bytes:
    return json.dumps(finite({"event": event, "time": time.time(), **fields}), default=str).encode() + b"\n"


def _say(text: str) -> None:
    with suppress(OSError, ValueError):  # the disk under stderr may be full, too
        print(text, file=sys.stderr, flush=True)


def finite(value: Any) -> Any:
    """Return ``value`` with null for numbers that JSON does not know."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {name: finite(one) for name, one in value.items()}
        case list() | tuple():
            return [finite(one) for one in value]
        case _:
            return value
