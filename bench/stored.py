"""What benches have measured, kept in bench/results, so that pages are written from it without measuring again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "results"


def load(name: str) -> dict[str, dict[str, Any]]:
    """Table → row → what was measured; empty where nothing was."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def save(name: str, tables: dict[str, dict[str, Any]]) -> None:
    """Write it, a line a row, so that a difference between two runs can be read."""
    parts: list[str] = []
    for table, rows in tables.items():
        lines = ",\n".join(f"    {json.dumps(row)}: {json.dumps(value)}" for row, value in rows.items())
        parts.append(f"  {json.dumps(table)}: {{\n{lines}\n  }}")
    (FOLDER / f"{name}.json").write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
