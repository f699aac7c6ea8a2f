"""A run's forecast beside its measurement, as a table."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from phalanx.observe.beside import LATE, Beside
from phalanx.observe.summary import RunSummary
from phalanx.planner.explain import PARTS
from phalanx.units import show_bytes, show_seconds

_WORDS = {
    "whole": "time per step",
    "passes": "  forward and backward",
    "computing": "    computing",
    "update": "  update",
    "rest": "  data and logging",
}


def beside_table(summary: RunSummary) -> Iterator[RenderableType]:
    """Forecast and measurement side by side, or why there is no forecast; nothing where nobody asked for one."""
    if summary.forecast is None:
        return
    forecast = summary.forecast.get("forecast")
    if forecast is None:
        yield Text(f"no forecast: {_why(summary)}", style="dim")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for heading in ("forecast", "measured", "forecast / measured"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in summary.beside:
        table.add_row(_name(row), *(_shown(row, number) for number in (row.forecast, row.measured)), _ratio(row))
    yield table
    yield from (Text(f"note: {note}", style="dim") for note in forecast.get("notes", ()))


def _why(summary: RunSummary) -> str:
    why = (summary.forecast or {}).get("missing", "")
    return f"{why}; phalanx show {summary.folder} makes it" if why == LATE else why


def _name(row: Beside) -> str:
    if row.what == "memory":
        return f"memory: {row.part}"
    return _WORDS.get(row.part) or f"    {PARTS.get(row.part, row.part)}"


def _shown(row: Beside, number: float | None) -> str:
    if number is None:
        return ""
    return show_seconds(number) if row.what == "step" else show_bytes(number)


def _ratio(row: Beside) -> str:
    return "" if row.ratio is None else f"{row.ratio:.2f}"
