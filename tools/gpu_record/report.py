"""A running step: its arguments, and the lines it appends for ``run.py`` to read."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Step:
    """A running step.

    Attributes:
        messages: file of JSON lines that ``run.py`` reads.
        record: the record so far, a JSON file.
        device: ``cuda`` or ``cpu``.
        limit: seconds from the start of the process to its kill.
        part: name of a part of the step, for a step that starts processes; else "".
    """

    name: str
    messages: Path
    record: Path
    device: str
    limit: float
    part: str = ""
    begun: float = field(default_factory=time.monotonic)

    @property
    def small(self) -> bool:
        """True on a CPU, which runs the small versions."""
        return self.device == "cpu"

    def facts(self, **facts: Any) -> None:
        """Add facts to the record; a second value for a name replaces the first."""
        self._say({"facts": facts})

    def row(self, *key: str, **values: Any) -> None:
        """Add the row ``key`` to the record, or add values to it."""
        self._say({"row": "|".join(key), "values": values})

    def note(self, text: str) -> None:
        """Add a sentence to the fact ``note``."""
        self._say({"note": text})

    def skip(self, why: str) -> None:
        """Have the step recorded as skipped; the caller returns then."""
        self._say({"skip": why})

    def failed(self, text: str) -> None:
        """Tell the traceback that the step ends by."""
        self._say({"traceback": text})

    @property
    def left(self) -> float:
        """Seconds until the limit."""
        return self.limit - (time.monotonic() - self.begun)

    def earlier(self, name: str) -> dict[str, Any]:
        """Return an earlier step of this record; without rows and facts if it was not asked for."""
        steps = json.loads(self.record.read_text(encoding="utf-8"))["steps"]
        return next((step for step in steps if step["name"] == name), {"rows": [], "facts": {}})

    def _say(self, message: dict[str, Any]) -> None:
        # One write to a file opened for appending: lines of several processes do not mix.
        with self.messages.open("ab", buffering=0) as file:
            file.write(json.dumps(plain(message)).encode() + b"\n")


def plain(value: Any) -> Any:
    """Return ``value`` as JSON has it: a number that is not finite becomes ``None``."""
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | bool | int):
        return value
    return str(value)


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its type if it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
