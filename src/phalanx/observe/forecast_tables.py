"""What forecasts look like in a terminal. What they show is what ``--json`` prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isfinite

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from phalanx.forecast import Forecast
from phalanx.planner import Bill, Shortfall
from phalanx.planner.explain import PARTS
from phalanx.planner.single import Foretold
from phalanx.spec import Plan
from phalanx.units import show_bytes, show_count, show_seconds

_WIDTH = 30


def forecast_view(name: str, found: Foretold) -> RenderableType:
    """One plan: what it comes to, memory and time by part, and what would make it fit."""
    one = found.forecast
    parts: list[RenderableType] = [
        Text.assemble((name, "bold"), f" under {one.plan} on {one.cluster}"),
        facts(one, found.bill, found.question.steps),
        memory_bars(one),
        step_bars(one),
    ]
    if found.shortfall:
        parts.append(shortfall_view(found.shortfall))
    parts += [Text(f"note: {note}", style="dim") for note in one.notes]
    return Group(*parts)


def facts(one: Forecast, paid: Bill, steps: int) -> RenderableType:
    """What a forecast comes to, one line a fact."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    verdict = "yes" if one.fits else "[red]no[/]"
    share = one.reserved / one.room
    odds = f"{one.runs_out:.0%}" if one.runs_out >= 0.005 else "less than 1%"
    held = f"{show_bytes(one.reserved)} of {show_bytes(one.room)} ({share:.0%})"
    table.add_row("fits", f"{verdict}: {held}; chance to run out of memory: {odds}")
    if one.unrun:
        table.add_row("train", f"does not run this yet: {escape(one.unrun)}")
    if one.host:
        whole = f" of {show_bytes(one.host_room)}" if isfinite(one.host_room) else ", which is not known to be there"
        table.add_row("on the host", f"{show_bytes(one.host)}{whole}, of all ranks of a node")
    table.add_row("time per step", f"{show_seconds(one.step)}  (4 of 5: {_range(one)})")
    table.add_row("4 of 5 by", escape(one.basis))
    pace = f"{show_count(one.throughput)} samples/s"
    table.add_row("pace", pace + (f", {show_count(one.throughput * one.tokens)} tokens/s" if one.tokens > 1 else ""))
    table.add_row("MFU", f"{one.mfu:.1%} of {show_count(one.peak)}FLOP/s")
    table.add_row("bound by", escape(", ".join(one.limits)))
    table.add_row("exact", escape(one.plan.exactness))
    for what, said in bill_rows(paid, steps):
        table.add_row(what, said)
    return table


def bill_rows(paid: Bill, steps: int) -> list[tuple[str, str]]:
    """What the training takes, and costs as far as that is known."""
    if not steps:
        return [("energy", f"at most {paid.energy * 3.6e6:.3g} J a step")] if paid.energy else []
    rows = [(f"{steps:,} steps", f"{show_seconds(paid.seconds)}, {paid.device_hours:.3g} device-hours")]
    if paid.energy is not None:
        rows.append(("energy", f"at most {paid.energy:.3g} kWh, devices alone"))
    if paid.money is not None:
        rows.append(("cost", money(paid)))
    return rows


def money(paid: Bill) -> str:
    """A price with its currency, if known."""
    amount = f"{paid.money:,.2f}" if paid.money is not None and paid.money >= 0.005 else f"{paid.money or 0:.2g}"
    return f"{amount} {paid.currency}".strip()


def short(plan: Plan) -> str:
    """A plan without its precision, for tables whose heading says that."""
    return str(replace(plan, precision="fp32"))


def memory_bars(one: Forecast) -> RenderableType:
    """Memory of the rank that needs most, by part."""
    return _bars("memory", one.memory, one.reserved, show_bytes)


def step_bars(one: Forecast) -> RenderableType:
    """Seconds of a step, by part."""
    return _bars("step", {PARTS[name]: seconds for name, seconds in one.seconds.items()}, one.step, show_seconds)


def shortfall_view(missing: Shortfall) -> RenderableType:
    """What is missing, and the nearest changes that would fit."""
    said = f"does not fit: {show_bytes(missing.missing)} ({missing.missing:,.0f} bytes) too little on each device"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("would fit", "time per step", "to spare"):
        table.add_column(heading, justify="left" if heading == "would fit" else "right", overflow="fold")
    for change in missing.changes:
        table.add_row(escape(change.words), show_seconds(change.step), show_bytes(change.spare))
    return Group(Text(said, style="red"), table if missing.changes else Text("Nothing near would fit."))


def _bars(heading: str, sizes: Mapping[str, float], whole: float, show: Callable[[float], str]) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(heading)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("share", justify="right")
    table.add_column("", no_wrap=True)
    for name, size in sizes.items():
        share = size / whole if whole else 0.0
        if share >= 0.0005:
            table.add_row(name, show(size), f"{share:.0%}", "█" * round(share * _WIDTH) or "▏")
    return table


def _range(one: Forecast) -> str:
    return f"{show_seconds(one.low)} to {show_seconds(one.high)}"
