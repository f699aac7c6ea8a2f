"""The append-only event log of a run. Training writes it; everything that shows something reads it.

A run goes on whether its log can be written or not: on a full disk events wait in memory and are written later. Who
reads a log takes it for what it may be, a stranger's: lines that are no events are counted and left out.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from phalanx.events.schema import understood
from phalanx.files import json_value, open_plain

_KEPT = 1000  # events that wait while the log cannot be written


class EventLog:
    """Appends events to a file, one JSON object a line; what a run that was killed left half written stays a line.

    Where the file cannot be written this is said once on stderr, until it can be again. The newest thousand events wait
    and are written as soon as that works; how many older ones were lost then stands before them, in an event ``lost``.
    """

    def __init__(self, path: Path, *, warns: bool = True) -> None:
        """``warns``: says so where it cannot be written; not beside an error that is about to be said.

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
        """Write what waits. Returns whether all of it is written."""
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
        self._reason = ""  # the next time is said again
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
    """Reads a log that may still grow: each call of ``new`` gives the events added since the last.

    Attributes:
        skipped: whole lines so far that were no events as the schema has them, and were left out.
    """

    def __init__(self, path: Path) -> None:
        self.skipped = 0
        self._path = path
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        """Whole events added since the last call; a line still being written waits for the next.

        A line that was never finished, because its run was killed, is left out.

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


def read(path: Path) -> Iterator[dict[str, Any]]:
    """All events of a finished log, in order."""
    yield from EventReader(path).new()


def last_failure(events: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The error that has ended the run whose last ``events`` these are; empty where none has since it last began.

    A worker that only lost another may say so after the one that failed by itself: where they met is gone by then.
    """
    last: Mapping[str, Any] = {}
    for event in events:
        if event["event"] in ("start", "resume") or (event["event"] == "error" and not (_own(last) and _lost(event))):
            last = event
    return last if last.get("event") == "error" else {}


def own_failure(events: Iterable[Mapping[str, Any]]) -> str:
    """By what the job's own code has ended the run, whose last ``events`` these are; empty where it has not.

    A worker that was lost is none of it: it may well not be lost again.
    """
    last = last_failure(events)
    return last["message"] if _own(last) else ""


def _own(event: Mapping[str, Any]) -> bool:
    return event.get("event") == "error" and not _lost(event)


def _lost(event: Mapping[str, Any]) -> bool:
    """Of an error: by a worker that was lost, as far as is known."""
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
    """``value`` with null for numbers that JSON does not know."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {name: finite(one) for name, one in value.items()}
        case list() | tuple():
            return [finite(one) for one in value]
        case _:
            return value
