"""What ranked plans and their explanation look like in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from phalanx.forecast import Forecast
from phalanx.observe.forecast_tables import facts, memory_bars, money, short, shortfall_view, step_bars
from phalanx.planner import Ranking
from phalanx.planner.advise import Advice
from phalanx.planner.explain import Explanation, Neighbour, tied
from phalanx.planner.scaling import Point
from phalanx.units import show_bytes, show_seconds

_MOST_NEIGHBOURS = 12


def plan_view(name: str, advice: Advice) -> RenderableType:
    """The ranked plans, why the first wins, and what its neighbours would cost."""
    ranking, question = advice.ranking, advice.ranking.question
    heading = Text.assemble(
        (name, "bold"), f" on {question.cluster}, batch {question.work.batch}, {question.precision}"
    )
    if advice.shortfall:
        considered = Text(f"None of {ranking.search.considered:,} plans fits; the least hungry is")
        return Group(
            heading, considered, Text(f"  {advice.shortfall.plan}", style="bold"), shortfall_view(advice.shortfall)
        )
    best, explanation = ranking.best, advice.explanation
    assert best is not None
    assert explanation is not None
    assert ranking.bill is not None
    parts: list[RenderableType] = [heading, ranked(ranking.plans)]
    if not ranking.met:
        parts.append(Text("No number of these devices is within the bounds; this comes nearest.", style="red"))
    parts += [facts(best, ranking.bill, question.steps), *_why(explanation), memory_bars(best), step_bars(best)]
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
    if explanation.argued:
        parts.append(_argued(explanation.argued))
    if explanation.neighbours:
        parts.append(_neighbours(explanation.neighbours))
    return parts


def _argued(one: Neighbour) -> RenderableType:
    if one.forecast.fits and one.slower > 0:
        verdict = f"{one.slower:.1%} slower ({show_seconds(one.forecast.step)} a step): {one.why}"
    else:
        verdict = one.why
    return Text.assemble("\n", ("because ", "bold"), f"{one.change}: {verdict}")


def _neighbours(all_of_them: tuple[Neighbour, ...]) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("with", no_wrap=True)
    table.add_column("time per step", justify="right", no_wrap=True)
    table.add_column("it would cost", overflow="fold")
    fit = [one for one in all_of_them if one.forecast.fits]
    unfit = [one for one in all_of_them if not one.forecast.fits]
    shown = [*fit[: _MOST_NEIGHBOURS - min(3, len(unfit))], *unfit[:3]]
    for one in shown:
        added = f"{one.slower:+.1%}" if one.forecast.fits else "-"
        table.add_row(one.change, added, one.why, style=None if one.forecast.fits else "dim")
    more = len(all_of_them) - len(shown)
    return Group(table, Text(f"and {more} more; --json lists all", style="dim")) if more > 0 else table


def _fewer(ranking: Ranking) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("devices", justify="right")
    paid = any(one.bill.money is not None for one in ranking.points)
    steps = ranking.question.steps
    for heading in ("time\nper step", "efficiency", *(("cost",) if paid and steps else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("plan", overflow="fold")
    for one in ranking.points:
        cells = [show_seconds(one.forecast.step), f"{one.efficiency:.0%}", *_cost(one, paid and steps > 0)]
        here = one.devices == ranking.question.cluster.devices
        table.add_row(str(one.devices), *cells, escape(short(one.forecast.plan)), style="bold" if here else None)
    return table


def _cost(one: Point, shown: bool) -> tuple[str, ...]:
    return (money(one.bill),) if shown else ()
