"""What forecasts, ranked plans, scaling curves and rooflines look like in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from phalanx.config import Plan
from phalanx.forecast import Forecast
from phalanx.planner import Bill, Ranking, Shortfall
from phalanx.planner.advise import Advice, PlanForecast
from phalanx.planner.explain import PARTS, Explanation, Neighbour, tied
from phalanx.planner.roofline import RooflinePoint
from phalanx.planner.scale import Curve
from phalanx.report.tables import headed
from phalanx.units import show_bytes, show_count, show_number, show_seconds

_WIDTH = 30


def forecast_view(name: str, found: PlanForecast) -> RenderableType:
    """One plan: what it comes to, memory and time by part, and what would make it fit."""
    one = found.forecast
    parts: list[RenderableType] = [
        Text.assemble((name, "bold"), f" under {one.plan} on {one.cluster}"),
        facts(one, found.bill, found.question.steps),
        *by_part(one),
    ]
    if found.shortfall:
        parts.append(shortfall_view(found.shortfall))
    parts += [Text(f"note: {note}", style="dim") for note in one.notes]
    return Group(*parts)


def facts(one: Forecast, paid: Bill, steps: int) -> RenderableType:
    """Return the table of ``fact_rows``."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for what, said in fact_rows(one, paid, steps):
        table.add_row(what, Text(said, style="red" if what == "fits" and not one.fits else ""))
    return table


def fact_rows(one: Forecast, paid: Bill, steps: int) -> list[tuple[str, str]]:
    """Return what a forecast comes to, a fact and what it is."""
    odds = f"{one.runs_out:.0%}" if one.runs_out >= 0.005 else "less than 1%"
    held = f"{show_bytes(one.reserved)} of {show_bytes(one.room)} ({one.reserved / one.room:.0%})"
    rows = [("fits", f"{'yes' if one.fits else 'no'}: {held}; chance to run out of memory: {odds}")]
    rows += [("train", f"does not run this yet: {one.unrun}")] if one.unrun else []
    if one.host:
        whole = f" of {show_bytes(one.host_room)}" if isfinite(one.host_room) else ", which is not known to be there"
        rows.append(("on the host", f"{show_bytes(one.host)}{whole}, of all ranks of a node"))
    between = f"{show_seconds(one.low)} to {show_seconds(one.high)}"
    pace = f"{show_count(one.throughput)} samples/s"
    return [
        *rows,
        ("time per step", f"{show_seconds(one.step)}  (4 of 5: {between})"),
        ("4 of 5 by", one.basis),
        ("pace", pace + (f", {show_count(one.throughput * one.tokens)} tokens/s" if one.tokens > 1 else "")),
        ("MFU", f"{one.mfu:.1%} of {show_count(one.peak)}FLOP/s"),
        ("bound by", ", ".join(one.limits)),
        ("exact", one.plan.exactness),
        *bill_rows(paid, steps),
    ]


def bill_rows(paid: Bill, steps: int) -> list[tuple[str, str]]:
    """What the training takes, and costs as far as that is known."""
    if not steps:
        return [("energy", f"at most {paid.energy * 3.6e6:.3g} J a step")] if paid.energy else []
    rows = [(f"{steps:,} steps", f"{show_seconds(paid.seconds)}, {show_number(paid.device_hours)} device-hours")]
    if paid.energy is not None:
        rows.append(("energy", f"at most {show_number(paid.energy)} kWh, devices alone"))
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


def by_part(one: Forecast) -> list[RenderableType]:
    """Return memory of the rank that needs most, and seconds of a step, by part."""
    seconds = {PARTS[name]: each for name, each in one.seconds.items()}
    memory = _bars("memory", one.memory, one.reserved, show_bytes)
    return [memory, _bars("step", seconds, one.step, show_seconds)]


def shortfall_view(missing: Shortfall) -> RenderableType:
    """What is missing, and the nearest changes that would fit."""
    said = f"does not fit: {show_bytes(missing.missing)} ({missing.missing:,.0f} bytes) too little on each device"
    table = headed("would fit", numbers=("time per step", "to spare"))
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


_MOST_NEIGHBOURS = 12


def plan_view(name: str, advice: Advice) -> RenderableType:
    """The ranked plans, why the first wins, and what its neighbours would cost."""
    ranking, question = advice.ranking, advice.ranking.question
    asked = f" on {question.cluster}, batch {question.work.batch}, {question.precision}"
    heading = Text.assemble((name, "bold"), asked)
    if missing := advice.shortfall:
        considered = Text(f"None of {ranking.search.considered:,} plans fits; the least hungry is")
        return Group(heading, considered, Text(f"  {missing.plan}", style="bold"), shortfall_view(missing))
    best, explanation = ranking.best, advice.explanation
    assert best is not None
    assert explanation is not None
    assert ranking.bill is not None
    parts: list[RenderableType] = [heading, ranked(ranking.plans)]
    if not ranking.met:
        parts.append(Text("No number of these devices is within the bounds; this comes nearest.", style="red"))
    parts += [facts(best, ranking.bill, question.steps), *_why(explanation), *by_part(best)]
    if len(ranking.points) > 1:
        parts.append(_fewer(ranking))
    parts += [Text(f"note: {note}", style="dim") for note in best.notes]
    return Group(*parts)


def ranked(plans: Sequence[Forecast]) -> RenderableType:
    """Plans, the best first; ``=`` where one is as fast as the first as far as forecasts can tell."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", justify="right")
    table.add_column("plan", overflow="fold")
    for heading in ("time\nper step", "4 of 5\nwithin", "MFU", "memory\nof a rank", "chance to\nrun out"):
        table.add_column(heading, justify="right", no_wrap=True)
    for place, one in enumerate(plans, 1):
        within = f"{show_seconds(one.low)} - {show_seconds(one.high)}"
        odds = f"{one.runs_out:.0%}" if one.runs_out >= 0.005 else "< 1%"
        cells = (show_seconds(one.step), within, f"{one.mfu:.1%}", show_bytes(one.reserved), odds)
        mark = "=" if place > 1 and tied(plans[0], one) else ""
        what = escape(short(one.plan))
        if one.unrun:
            what += f"\n[yellow]train does not run this yet: {escape(one.unrun)}[/]"
        table.add_row(f"{mark}{place}", what, *cells, style="bold" if place == 1 else None)
    return table


def _why(explanation: Explanation) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(""), *(Text(f"- {reason}") for reason in explanation.reasons)]
    if one := explanation.argued:
        slower = f"{one.slower:.1%} slower ({show_seconds(one.forecast.step)} a step): "
        verdict = f"{slower if one.forecast.fits and one.slower > 0 else ''}{one.why}"
        parts.append(Text.assemble("\n", ("because ", "bold"), f"{one.change}: {verdict}"))
    if explanation.neighbours:
        parts.append(_neighbours(explanation.neighbours))
    return parts


def _neighbours(all_of_them: tuple[Neighbour, ...]) -> RenderableType:
    table = headed("with", numbers=("time per step",), after=("it would cost",))
    fit = [one for one in all_of_them if one.forecast.fits]
    unfit = [one for one in all_of_them if not one.forecast.fits]
    shown = [*fit[: _MOST_NEIGHBOURS - min(3, len(unfit))], *unfit[:3]]
    for one in shown:
        added = f"{one.slower:+.1%}" if one.forecast.fits else "-"
        table.add_row(one.change, added, one.why, style=None if one.forecast.fits else "dim")
    more = len(all_of_them) - len(shown)
    return Group(table, Text(f"and {more} more; --json lists all", style="dim")) if more > 0 else table


def _fewer(ranking: Ranking) -> RenderableType:
    paid = any(one.bill.money is not None for one in ranking.points)
    steps = ranking.question.steps
    numbers = ("devices", "time\nper step", "efficiency", *(("cost",) if paid and steps else ()))
    table = headed(numbers=numbers, after=("plan",))
    for one in ranking.points:
        cells = [show_seconds(one.forecast.step), f"{one.efficiency:.0%}"]
        cells += [money(one.bill)] if paid and steps else []
        here = one.devices == ranking.question.cluster.devices
        table.add_row(str(one.devices), *cells, escape(short(one.forecast.plan)), style="bold" if here else None)
    return table


_CURVE_WIDTH = 76


def scale_view(name: str, curve: Curve, width: int = 80) -> RenderableType:
    """The curve, and what it says."""
    said = [Text(f"- {sentence}") for sentence in sentences(curve)]
    if not curve.points:
        return Group(Text(f"{name}: no number of devices fits", style="red"), *said)
    heading = Text.assemble((name, "bold"), f", {curve.points[0].forecast.plan.precision}")
    parts: list[RenderableType] = [heading, _table(curve)]
    if len(curve.points) > 1:
        parts.append(Text.from_ansi(scaling_chart(curve, min(width, _CURVE_WIDTH))))
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
    alike: dict[str, list[int]] = {}
    for devices, why in curve.without.items():
        alike.setdefault(why, []).append(devices)
    for why, counts in alike.items():
        many = "1 device" if counts == [1] else f"{', '.join(map(str, counts))} devices"
        found.append(f"{many}: {why}.")
    return found


def _table(curve: Curve) -> RenderableType:
    between = columns(curve)
    table = headed(numbers=("devices", *between), after=("plan",), narrow=True)
    for one, cells in zip(curve.points, zip(*between.values(), strict=True), strict=True):
        mark = "← stop" if one is curve.stop else "← knee" if one is curve.knee else ""
        plan = f"{short(one.forecast.plan)} {mark}".strip()
        style = "bold" if mark == "← stop" else None if one in curve.allowed else "dim"
        table.add_row(str(one.devices), *cells, escape(plan), style=style)
    return table


def columns(curve: Curve) -> dict[str, list[str]]:
    """Those between devices and plan: heading → the text of each point."""
    points, bills = curve.points, [one.bill for one in curve.points]
    found = {"time\nper step": [show_seconds(one.forecast.step) for one in points]}
    if not curve.steps:
        found["samples/s"] = [show_count(one.forecast.throughput) for one in points]
    found["effi-\nciency"] = [f"{one.efficiency:.0%}" for one in points]
    if curve.steps:
        found["in all"] = [show_seconds(one.seconds) for one in bills]
        found["device-\nhours"] = [show_number(one.device_hours) for one in bills]
        if all(one.energy is not None for one in bills):
            found["kWh"] = [show_number(one.energy or 0.0) for one in bills]
        if any(one.money is not None for one in bills):
            found["cost"] = [money(one) for one in bills]
    return found


_HEIGHT = 15
_MOST_TICKS = 8


def scaling_chart(curve: Curve, width: int) -> str:
    """Speed-up against devices, both logarithmic, beside the ideal; with the escape codes of a terminal."""
    import plotext  # loaded when a chart is drawn: it takes a tenth of a second

    plt: Any = plotext
    devices = [one.devices for one in curve.points]
    plt.clear_figure()
    plt.theme("clear")
    plt.plot_size(width, _HEIGHT)
    plt.plot(devices, [one / devices[0] for one in devices], marker="dot", label="ideal")
    plt.plot(devices, [one.speed_up for one in curve.points], marker="braille", label="forecast")
    for name, point in (("knee", curve.knee), ("stop", curve.stop)):
        if point is not None and (name == "stop" or point is not curve.stop):
            plt.scatter([point.devices], [point.speed_up], marker="x" if name == "knee" else "o", label=name)
    plt.xscale("log")
    plt.yscale("log")
    shown = devices[:: len(devices) // -_MOST_TICKS][::-1]
    plt.xticks(shown, [str(one) for one in shown])
    ideal = [one / devices[0] for one in shown]
    plt.yticks(ideal, [f"{one:g}" for one in ideal])
    plt.xlabel("devices")
    plt.title("speed-up")
    return str(plt.build())


_LEGEND = (
    "roof: the most FLOP/s that peak and memory bandwidth allow at the model's FLOP per byte, each kernel by itself"
)


def roofline_view(name: str, lines: Sequence[RooflinePoint]) -> RenderableType:
    """One row a device."""
    numbers = ("time\nper step", "MFU", "FLOP\n/byte", "roof\nFLOP/s")
    table = headed("device", numbers=numbers, after=("bound by", "most of it"), narrow=True)
    table.caption = _LEGEND
    for one in lines:
        there = one.forecast
        cells = ("-", "-") if there is None else (show_seconds(there.step), f"{there.mfu:.1%}")
        most = f"lacks {show_bytes(one.missing)}" if there is None else one.most
        roof = (f"{one.intensity:.0f}", show_count(one.attainable))
        table.add_row(one.device, *cells, *roof, one.bound, most, style="dim" if there is None else None)
    return Group(Text.assemble((name, "bold"), " on one device of each kind"), table)
