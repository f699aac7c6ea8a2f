"""Forecasts, ranked plans, scaling curves and rooflines as rows, which pages show too, and as text for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isfinite, log2
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from phalanx.config import Plan
from phalanx.forecast import Forecast
from phalanx.planner import Bill, Shortfall
from phalanx.planner.advise import Advice, PlanForecast
from phalanx.planner.explain import PARTS, Explanation, Neighbour, tied
from phalanx.planner.roofline import RooflinePoint
from phalanx.planner.scale import Curve, ScalingPoint
from phalanx.report.render import facts, table
from phalanx.units import show_bytes, show_count, show_number, show_seconds

_NUMBERS = (
    *("", "devices", "time\nper step", "4 of 5\nwithin", "MFU", "memory\nof a rank", "chance to\nrun out", "to spare"),
    *("cost", "efficiency", "samples/s", "in all", "device-\nhours", "kWh", "share", "FLOP\n/byte", "roof\nFLOP/s"),
)  # headings

_WIDTH = 30  # of bars, in characters
_MOST_NEIGHBOURS = 12


def forecast_view(name: str, found: PlanForecast) -> RenderableType:
    """Return one plan: its numbers, memory and time by part, and changes that would make it fit."""
    one = found.forecast
    heading = Text.assemble((name, "bold"), f" under {one.plan} on {one.cluster}")
    missing = [_shortfall(found.shortfall)] if found.shortfall else []
    return Group(heading, *_numbers(one, found.bill, found.question.steps), *_by_part(one), *missing, *_notes(one))


def plan_view(name: str, advice: Advice) -> RenderableType:
    """Return the ranked plans, the reasons for the first, and the cost of its neighbours."""
    ranking, question, explanation = advice.ranking, advice.ranking.question, advice.explanation
    asked = f" on {question.cluster}, batch {question.work.batch}, {question.precision}"
    heading = Text.assemble((name, "bold"), asked)
    if missing := advice.shortfall:
        considered = Text(f"None of {ranking.search.considered:,} plans fits; the least hungry is")
        return Group(heading, considered, Text(f"  {missing.plan}", style="bold"), _shortfall(missing))
    best = ranking.best
    assert best is not None
    assert explanation is not None
    assert ranking.bill is not None
    parts = [heading, _table(plan_rows(ranking.plans), styles=["bold", *[None] * (len(ranking.plans) - 1)])]
    if not ranking.met:
        parts.append(Text("No number of these devices is within the bounds; this comes nearest.", style="red"))
    parts += [*_numbers(best, ranking.bill, question.steps), *_why(explanation), *_by_part(best)]
    if len(ranking.points) > 1:
        here = ["bold" if one.devices == question.cluster.devices else None for one in ranking.points]
        parts.append(_table(curve_rows(ranking.points, question.steps), styles=here))
    return Group(*parts, *_notes(best))


def scale_view(name: str, curve: Curve) -> RenderableType:
    """Return the curve, and the sentences about it."""
    said = [Text(f"- {sentence}") for sentence in sentences(curve)]
    if not curve.points:
        return Group(Text(f"{name}: no number of devices fits", style="red"), *said)
    rows, styles, bars = curve_rows(curve.points, curve.steps), list[str | None](), list[str]()
    first, most = curve.points[0].devices, log2(curve.points[-1].devices / curve.points[0].devices) or 1.0
    for row, one in zip(rows, curve.points, strict=True):
        mark = " ← stop" if one is curve.stop else " ← knee" if one is curve.knee else ""
        row["plan"] += mark
        styles.append("bold" if one is curve.stop else None if one in curve.allowed else "dim")
        ideal, length = log2(one.devices / first), round(_WIDTH * max(0.0, log2(one.speed_up)) / most)
        bars.append("█" * length + "·" * (round(_WIDTH * ideal / most) - length))
    speeds = [f"{one.speed_up:.3g}" for one in curve.points]
    drawn = [
        {"devices": row["devices"], "speed-up": speed, "· ideal, logarithmic": bar}
        for row, speed, bar in zip(rows, speeds, bars, strict=True)
    ]
    charts = [table(drawn, numbers=("devices", "speed-up"))] if len(rows) > 1 else []
    heading = Text.assemble((name, "bold"), f", {curve.points[0].forecast.plan.precision}")
    return Group(heading, _table(rows, styles=styles), *charts, *said)


def roofline_view(name: str, lines: Sequence[RooflinePoint]) -> RenderableType:
    """Return one row a device."""
    rows = [
        {
            "device": one.device,
            "time\nper step": show_seconds(one.forecast.step) if one.forecast else "-",
            "MFU": f"{one.forecast.mfu:.1%}" if one.forecast else "-",
            "FLOP\n/byte": f"{one.intensity:.0f}",
            "roof\nFLOP/s": show_count(one.attainable),
            "bound by": one.bound,
            "most of it": one.most if one.forecast else f"lacks {show_bytes(one.missing)}",
        }
        for one in lines
    ]
    made = _table(rows, styles=[None if one.forecast else "dim" for one in lines])
    made.caption = "roof: the most FLOP/s that peak and memory bandwidth allow at the model's FLOP per byte"
    return Group(Text.assemble((name, "bold"), " on one device of each kind"), made)


def fact_rows(one: Forecast, paid: Bill, steps: int) -> dict[str, str]:
    """Return the numbers of a forecast by name; empty if not known."""
    held = f"{show_bytes(one.reserved)} of {show_bytes(one.room)} ({one.reserved / one.room:.0%})"
    room = f" of {show_bytes(one.host_room)}" if isfinite(one.host_room) else ", which is not known to be there"
    pace = f"{show_count(one.throughput)} samples/s"
    rows = {
        "fits": f"{'yes' if one.fits else 'no'}: {held}; chance to run out of memory: {_odds(one)}",
        "train": f"does not run this yet: {one.unrun}" if one.unrun else "",
        "on the host": f"{show_bytes(one.host)}{room}, of all ranks of a node" if one.host else "",
        "time per step": f"{show_seconds(one.step)}  (4 of 5: {_within(one)})",
        "4 of 5 by": one.basis,
        "pace": pace + (f", {show_count(one.throughput * one.tokens)} tokens/s" if one.tokens > 1 else ""),
        "MFU": f"{one.mfu:.1%} of {show_count(one.peak)}FLOP/s",
        "bound by": ", ".join(one.limits),
        "exact": one.plan.exactness,
    }
    if not steps:
        return rows | {"energy": f"at most {paid.energy * 3.6e6:.3g} J a step" if paid.energy else ""}
    energy = "" if paid.energy is None else f"at most {show_number(paid.energy)} kWh, devices alone"
    spent = f"{show_seconds(paid.seconds)}, {show_number(paid.device_hours)} device-hours"
    return rows | {f"{steps:,} steps": spent, "energy": energy, "cost": _money(paid)}


def plan_rows(plans: Sequence[Forecast]) -> list[dict[str, str]]:
    """Return a row a plan, the best first; ``=``: as fast as the first, as far as forecasts can tell."""
    return [
        {
            "": f"{'=' if place > 1 and tied(plans[0], one) else ''}{place}",
            "plan": short(one.plan) + (f"\ntrain does not run this yet: {one.unrun}" if one.unrun else ""),
            "time\nper step": show_seconds(one.step),
            "4 of 5\nwithin": _within(one),
            "MFU": f"{one.mfu:.1%}",
            "memory\nof a rank": show_bytes(one.reserved),
            "chance to\nrun out": _odds(one),
        }
        for place, one in enumerate(plans, 1)
    ]


def neighbour_rows(neighbours: Sequence[Neighbour]) -> list[dict[str, str]]:
    """Return a row a plan beside the first."""
    return [
        {
            "with": one.change,
            "time\nper step": f"{one.slower:+.1%}" if one.forecast.fits else "-",
            "it would cost": one.why,
        }
        for one in neighbours
    ]


def shortfall_rows(missing: Shortfall) -> list[dict[str, str]]:
    """Return a row a change that would make a plan fit."""
    return [
        {"would fit": one.words, "time\nper step": show_seconds(one.step), "to spare": show_bytes(one.spare)}
        for one in missing.changes
    ]


def curve_rows(points: Sequence[ScalingPoint], steps: int) -> list[dict[str, str]]:
    """Return a row a number of devices, of the points of a curve or of a ranking; with bills if ``steps`` is not 0."""
    bills, rows = [one.bill for one in points], list[dict[str, str]]()
    energy, money = all(one.energy is not None for one in bills), any(one.money is not None for one in bills)
    for one, paid in zip(points, bills, strict=True):
        row = {"devices": str(one.devices), "time\nper step": show_seconds(one.forecast.step)}
        row |= {} if steps else {"samples/s": show_count(one.forecast.throughput)}
        row["efficiency"] = f"{one.efficiency:.0%}"
        if steps:
            row |= {"in all": show_seconds(paid.seconds), "device-\nhours": show_number(paid.device_hours)}
            row |= {"kWh": show_number(paid.energy or 0.0)} if energy else {}
            row |= {"cost": _money(paid)} if money else {}
        rows.append(row | {"plan": short(one.forecast.plan)})
    return rows


def sentences(curve: Curve) -> list[str]:
    """Return sentences about a curve: its knee, slower numbers of devices, the best number, plans that do not fit."""
    found: list[str] = []
    knee, slower, stop = curve.knee, curve.slower, curve.stop
    if curve.points and curve.fastest is curve.points[0] and len(curve.points) > 1:
        first, step = curve.points[0].devices, show_seconds(curve.points[0].forecast.step)
        one = "One device is best" if first == 1 else f"{first} devices, the fewest that it fits on, are best"
        found.append(f"{one}: on more, a step takes longer than the {step} there.")
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
        step = show_seconds(stop.forecast.step)
        found.append(f"Stop at {stop.devices}{bounds}: {stop.forecast.plan}, {step} a step{took}.")
    elif curve.points:
        found.append("No number of devices is within the bounds.")
    alike: dict[str, list[int]] = {}
    for devices, why in curve.without.items():
        alike.setdefault(why, []).append(devices)
    for why, counts in alike.items():
        many = "1 device" if counts == [1] else f"{', '.join(map(str, counts))} devices"
        found.append(f"{many}: {why}.")
    return found


def short(plan: Plan) -> str:
    """Return a plan without its precision, which is in the heading."""
    return str(replace(plan, precision="fp32"))


def _odds(one: Forecast) -> str:
    return f"{one.runs_out:.0%}" if one.runs_out >= 0.005 else "less than 1%"


def _within(one: Forecast) -> str:
    return f"{show_seconds(one.low)} to {show_seconds(one.high)}"


def _money(paid: Bill) -> str:
    if paid.money is None:
        return ""
    amount = f"{paid.money:,.2f}" if paid.money >= 0.005 else f"{paid.money:.2g}"
    return f"{amount} {paid.currency}".strip()


def _table(rows: Sequence[Mapping[str, Any]], styles: Sequence[str | None] = ()) -> Any:
    return table(rows, numbers=_NUMBERS, styles=styles, narrow=True)


def _numbers(one: Forecast, paid: Bill, steps: int) -> list[RenderableType]:
    rows: dict[str, Any] = fact_rows(one, paid, steps)
    return [facts(rows | {"fits": Text(rows["fits"], style="" if one.fits else "red")})]


def _notes(one: Forecast) -> list[RenderableType]:
    return [Text(f"note: {note}", style="dim") for note in one.notes]


def _shortfall(missing: Shortfall) -> RenderableType:
    said = f"does not fit: {show_bytes(missing.missing)} ({missing.missing:,.0f} bytes) too little on each device"
    near = _table(shortfall_rows(missing)) if missing.changes else Text("Nothing near would fit.")
    return Group(Text(said, style="red"), near)


def _by_part(one: Forecast) -> list[RenderableType]:
    """Return memory of the rank that needs most, and seconds of a step, by part."""
    seconds = {PARTS[name]: each for name, each in one.seconds.items()}
    return [_bars("memory", one.memory, one.reserved, show_bytes), _bars("step", seconds, one.step, show_seconds)]


def _bars(heading: str, sizes: Mapping[str, float], whole: float, show: Callable[[float], str]) -> RenderableType:
    shares = {name: size / whole for name, size in sizes.items() if whole and size / whole >= 0.0005}
    rows = [
        {heading: name, "": show(sizes[name]), "share": f"{share:.0%}", " ": "█" * round(share * _WIDTH) or "▏"}
        for name, share in shares.items()
    ]
    return _table(rows)


def _why(explanation: Explanation) -> list[RenderableType]:
    parts: list[RenderableType] = [Text(""), *(Text(f"- {reason}") for reason in explanation.reasons)]
    if one := explanation.argued:
        slower = f"{one.slower:.1%} slower ({show_seconds(one.forecast.step)} a step): "
        verdict = f"{slower if one.forecast.fits and one.slower > 0 else ''}{one.why}"
        parts.append(Text.assemble("\n", ("because ", "bold"), f"{one.change}: {verdict}"))
    unfit = [one for one in explanation.neighbours if not one.forecast.fits][:3]
    fit = [one for one in explanation.neighbours if one.forecast.fits][: _MOST_NEIGHBOURS - len(unfit)]
    if shown := [*fit, *unfit]:
        parts.append(_table(neighbour_rows(shown), styles=[*[None] * len(fit), *["dim"] * len(unfit)]))
    if (more := len(explanation.neighbours) - len(shown)) > 0:
        parts.append(Text(f"and {more} more; --json lists all", style="dim"))
    return parts
