"""The append-only event log of a run. Training writes it; everything that shows something reads it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class EventLog:
    """Appends events to a file, one JSON object a line, each line written whole."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def write(self, event: str, **fields: Any) -> None:
        """Append one event. Numbers JSON does not know (NaN, infinities) become null."""
        line = json.dumps({"event": event, "time": time.time(), **fields}, default=str)
        if "NaN" in line or "Infinity" in line:
            clean = {
                name: None if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in fields.items()
            }
            line = json.dumps({"event": event, "time": time.time(), **clean}, default=str)
        self._file.write(line.encode() + b"\n")

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
        """Whole events added since the last call; a line still being written waits for the next."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text.rfind(b"\n") + 1
        self._offset += whole
        return [json.loads(line) for line in text[:whole].splitlines() if line.strip()]


def read(path: Path) -> Iterator[dict[str, Any]]:
    """All events of a finished log, in order."""
    yield from EventReader(path).new()
