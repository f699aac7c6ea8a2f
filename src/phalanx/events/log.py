"""The append-only event log of a run. Training writes it; everything that shows something reads it."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class EventLog:
    """Appends events to a file, one JSON object a line; what a run that was killed left half written stays a line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        if _torn(path):
            self._write(b"\n")

    def write(self, event: str, **fields: Any) -> None:
        """Append one event. Numbers JSON does not know (NaN, infinities) become null, at any depth."""
        line = json.dumps(finite({"event": event, "time": time.time(), **fields}), default=str)
        self._write(line.encode() + b"\n")

    def _write(self, content: bytes) -> None:
        # Without a buffer one call may write a part only, such as on a network file system.
        rest = memoryview(content)
        while rest:
            rest = rest[self._file.write(rest) or 0 :]

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class EventReader:
    """Reads a log that may still grow: each call of ``new`` gives the events added since the last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        """Whole events added since the last call; a line still being written waits for the next.

        A line that was never finished, because its run was killed, is left out.
        """
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text.rfind(b"\n") + 1
        self._offset += whole
        events = (_event(line) for line in text[:whole].split(b"\n"))
        return [event for event in events if event is not None]


def read(path: Path) -> Iterator[dict[str, Any]]:
    """All events of a finished log, in order."""
    yield from EventReader(path).new()


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None


def _torn(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


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
