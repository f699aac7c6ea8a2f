"""Rows of a table of published training runs: configuration, measured step time, peak memory or that it ran out."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import Problem, SpecError

_NEEDED = ("id", "kind", "device", "devices", "batch", "precision", "framework")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One published run.

    Attributes:
        id: of the row.
        cells: of the table, by column; empty where the source states nothing.
    """

    id: str
    cells: Mapping[str, str]

    def text(self, name: str) -> str:
        """A cell; empty where there is none."""
        return (self.cells.get(name) or "").strip()

    def number(self, name: str, missing: float = 0.0) -> float:
        """A cell as a number; ``missing`` where it is empty or below zero, which no figure of a run is."""
        text = self.text(name)
        if not text:
            return missing
        try:
            value = float(text)
        except ValueError:
            allowed = "a number, or nothing"
            raise SpecError([Problem(where=f"{self.id}.{name}", given=repr(text), allowed=allowed, fix="1")]) from None
        return value if value >= 0 else missing

    def whole(self, name: str, missing: int = 1) -> int:
        """A cell as a whole number."""
        return int(self.number(name, float(missing)))

    def truth(self, name: str) -> bool:
        """Whether a cell says 1 or True."""
        return self.text(name).lower() in ("1", "true", "1.0")

    @property
    def calibrated(self) -> bool:
        """Whether constants were fitted on rows like this: half of them, by a fixed hash of the id."""
        return self.mark % 2 == 0

    @property
    def mark(self) -> int:
        """A number as good as any random one: the hash of the id."""
        return int(hashlib.sha256(self.id.encode()).hexdigest(), 16)

    @property
    def step(self) -> float:
        """Measured seconds of a step; 0 where there are none."""
        return self.number("step_s")

    @property
    def peak(self) -> float:
        """Measured bytes at the peak; 0 where not stated."""
        return self.number("peak_gib") * 2**30

    @property
    def ran_out(self) -> bool:
        """Whether it ran out of memory."""
        return self.truth("oom")


def read(path: Path) -> tuple[Row, ...]:
    """The rows of a CSV file.

    Raises:
        SpecError: if the file cannot be read, or lacks a column that every row needs.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            cells = list(csv.DictReader(file))
    except OSError as error:
        allowed = "a CSV file of published runs"
        raise SpecError(
            [Problem(where="ROWS", given=f"{path}: {error.strerror}", allowed=allowed, fix="measured.csv")]
        ) from None
    missing = [name for name in _NEEDED if not cells or name not in cells[0]]
    if missing:
        given = f"{path} without {', '.join(missing)}" if cells else f"{path} without rows"
        raise SpecError([Problem(where="ROWS", given=given, allowed=", ".join(_NEEDED), fix="measured.csv")])
    return tuple(Row(id=one["id"], cells=one) for one in cells)
