"""A work on one device of each kind, in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phalanx.planner.roofline import Lined
from phalanx.units import show_bytes, show_count, show_seconds

_LEGEND = (
    "roof: the most FLOP/s that peak and memory bandwidth allow at the model's FLOP per byte, each kernel by itself"
)


def roofline_view(name: str, lines: Sequence[Lined]) -> RenderableType:
    """One row a device."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), caption=_LEGEND)
    table.add_column("device", no_wrap=True)
    for heading in ("time\nper step", "MFU", "FLOP\n/byte", "roof\nFLOP/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    table.add_column("most of it", overflow="fold")
    for one in lines:
        there = one.forecast
        cells = ("-", "-") if there is None else (show_seconds(there.step), f"{there.mfu:.1%}")
        most = f"lacks {show_bytes(one.missing)}" if there is None else one.most
        roof = (f"{one.intensity:.0f}", show_count(one.attainable))
        table.add_row(one.device, *cells, *roof, one.bound, most, style="dim" if there is None else None)
    return Group(Text.assemble((name, "bold"), " on one device of each kind"), table)
