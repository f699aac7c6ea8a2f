"""What a scaling curve looks like in a terminal: a table, a chart, and where to stop."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from phalanx.observe.charts import scaling_chart
from phalanx.observe.forecast_tables import money, short
from phalanx.planner.scaling import Curve, Point
from phalanx.units import show_count, show_seconds

_WIDTH = 76


def scale_view(name: str, curve: Curve, width: int = 80) -> RenderableType:
    """The curve, and what it says."""
    said = [Text(f"- {sentence}") for sentence in sentences(curve)]
    if not curve.points:
        return Group(Text(f"{name}: no number of devices fits", style="red"), *said)
    parts: list[RenderableType] = [
        Text.assemble((name, "bold"), f", {curve.points[0].forecast.plan.precision}"),
        _table(curve),
    ]
    if len(curve.points) > 1:
        parts.append(Text.from_ansi(scaling_chart(curve, min(width, _WIDTH))))
    return Group(*parts, *said)


def sentences(curve: Curve) -> list[str]:
    """What the curve says, each a sentence."""
    found: list[str] = []
    knee, slower, stop = curve.knee, curve.slower, curve.stop
    if curve.points and curve.fastest is curve.points[0] and len(curve.points) > 1:
        first = curve.points[0].devices
        one = "One device is best" if first == 1 else f"{first} devices, the fewest that it fits on, are best"
        found.append(
            f"{one}: on more, a step takes longer than the {show_seconds(curve.points[0].forecast.step)} there."
        )
    elif knee is not None:
        after = curve.points[curve.points.index(knee) + 1]
        found.append(
            f"The knee is at {knee.devices}: {after.devices} devices gain {after.gain:.0%}, "
            f"less than {curve.share:.0%} of the {after.devices / knee.devices - 1:.0%} that they could."
        )
    elif len(curve.points) > 1:
        found.append(f"Every doubling gains at least {curve.share:.0%} of what it could.")
    if slower is not None and curve.fastest is not None:
        found.append(f"More is slower: {slower.devices} devices take longer than {curve.fastest.devices}.")
    if stop is not None:
        bounds = " within the bounds" if curve.budget or curve.deadline else ""
        took = f", {show_seconds(stop.bill.seconds)} in all" if curve.steps else ""
        found.append(
            f"Stop at {stop.devices}{bounds}: {stop.forecast.plan}, {show_seconds(stop.forecast.step)} a step{took}."
        )
    elif curve.points:
        found.append("No number of devices is within the bounds.")
    for why, counts in _alike(curve.without).items():
        many = "1 device" if counts == [1] else f"{', '.join(map(str, counts))} devices"
        found.append(f"{many}: {why}.")
    return found


def _alike(without: Mapping[int, str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for devices, why in without.items():
        found.setdefault(why, []).append(devices)
    return found


def _table(curve: Curve) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("devices", justify="right", no_wrap=True)
    for heading in headings(curve):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("plan", overflow="fold")
    for one in curve.points:
        mark = "← stop" if one is curve.stop else "← knee" if one is curve.knee else ""
        plan = f"{short(one.forecast.plan)} {mark}".strip()
        style = "bold" if mark == "← stop" else None if one in curve.allowed else "dim"
        table.add_row(str(one.devices), *cells(curve, one), escape(plan), style=style)
    return table


def headings(curve: Curve) -> tuple[str, ...]:
    """Of the columns between devices and plan."""
    whole = ("in all", "device-\nhours") if curve.steps else ()
    energy = ("kWh",) if curve.steps and all(one.bill.energy is not None for one in curve.points) else ()
    cost = ("cost",) if curve.steps and any(one.bill.money is not None for one in curve.points) else ()
    return ("time\nper step", *(() if whole else ("samples/s",)), "effi-\nciency", *whole, *energy, *cost)


def cells(curve: Curve, one: Point) -> tuple[str, ...]:
    """Of one row, for ``headings``."""
    wanted = headings(curve)
    made = [show_seconds(one.forecast.step)]
    made += [show_count(one.forecast.throughput)] if "samples/s" in wanted else []
    made.append(f"{one.efficiency:.0%}")
    if "in all" in wanted:
        made += [show_seconds(one.bill.seconds), f"{one.bill.device_hours:.3g}"]
    if "kWh" in wanted:
        made.append(f"{one.bill.energy:.3g}")
    if "cost" in wanted:
        made.append(money(one.bill))
    return tuple(made)
