"""A run beside its forecast, and plans between slow hosts beside this machine, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from phalanx.planner.explain import PARTS
from phalanx.report.comparison import LATE, Compared
from phalanx.report.summary import RunSummary
from phalanx.units import show_bytes, show_count, show_seconds

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


def _name(row: Compared) -> str:
    if row.what == "memory":
        return f"memory: {row.part}"
    return _WORDS.get(row.part) or f"    {PARTS.get(row.part, row.part)}"


def _shown(row: Compared, number: float | None) -> str:
    if number is None:
        return ""
    return show_seconds(number) if row.what == "step" else show_bytes(number)


def _ratio(row: Compared) -> str:
    return "" if row.ratio is None else f"{row.ratio:.2f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class BetweenHosts:
    """One plan between hosts.

    Attributes:
        plan: as one line of text.
        workers: processes that compute.
        device: their kind.
        step_seconds: median, between the hosts.
        samples_per_second: median, between the hosts.
        here_step_seconds: median, all workers on this machine, nothing slowed.
        here_samples_per_second: the same.
        share: samples/s between the hosts over those here.
        sent_per_step: bytes that each host put on its link for a step; ``None`` where it has no worker that tells.
    """

    plan: str
    workers: int
    device: str
    step_seconds: float
    samples_per_second: float
    here_step_seconds: float
    here_samples_per_second: float
    share: float
    sent_per_step: tuple[float | None, ...]

    @classmethod
    def of(cls, here: RunSummary, there: RunSummary, sent: Sequence[float | None]) -> Self:
        """The row of two runs, both of which have taken steps."""
        rate, base = there.samples_per_second or 0.0, here.samples_per_second or 0.0
        return cls(
            plan=there.plan,
            workers=there.devices,
            device=there.device,
            step_seconds=there.step_seconds or 0.0,
            samples_per_second=rate,
            here_step_seconds=here.step_seconds or 0.0,
            here_samples_per_second=base,
            share=rate / base if base else 0.0,
            sent_per_step=tuple(sent),
        )


def apart_table(rows: Sequence[BetweenHosts]) -> RenderableType:
    """Plans between hosts, and what is left of their speed here."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("plan", overflow="fold")
    headings = (
        "time\nper step",
        "samples/s",
        "sent a step\nby a host",
        "here: time\nper step",
        "here:\nsamples/s",
        "kept",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.plan,
            show_seconds(row.step_seconds),
            show_count(row.samples_per_second),
            _sent(row.sent_per_step),
            show_seconds(row.here_step_seconds),
            show_count(row.here_samples_per_second),
            f"{row.share:.0%}",
        )
    return table


def _sent(each: Sequence[float | None]) -> str:
    known = sorted(size for size in each if size is not None)
    if not known:
        return "?"
    least, most = show_bytes(known[0]), show_bytes(known[-1])
    return most if least == most or known[0] > 0.95 * known[-1] else f"{least} to {most}"
