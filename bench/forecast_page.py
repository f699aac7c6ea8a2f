"""What ``forecast_here.py`` found, as a page of the reference, and as the spread that intervals rest on."""

from __future__ import annotations

import math
import platform
import statistics
import tomllib
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from phalanx.config import Plan
from phalanx.forecast.uncertainty import FILE, quantile, technique
from phalanx.hardware import cores
from phalanx.report.summary import WARM_UP
from published.spread import HEAD, quantiles

if TYPE_CHECKING:
    from forecast_here import Case

    Refused = tuple[str, Plan, str]

PAGE = Path(__file__).parent.parent / "docs/project/accuracy-here.md"

_HEAD = """# Forecasts of this machine's own runs

Written by `PYTHONPATH=tools OMP_NUM_THREADS=1 python bench/forecast_here.py --rounds {asked} --write`; do not edit.

{when}, {cpu}, {cores} cores, one thread a process, by the clock. Runs go through `phalanx.fit`; a run's time of a step
is the median of {steps} steps, as its own summary tells it (the mean where replicas are averaged now and then). Each
plan ran in {rounds} rounds; of them the one with the middle error counts (of two, the one with the larger). Before a
run others kept {busy:.0%} of the cores busy in the median, {most:.0%} at most. Where there are more processes than
cores they take turns.

Constants of cores and exchanges are those of a `phalanx calibrate` before the plans of each model in each round; it
sees none of these models.
What sharded plans copy, the casts around products in 16 bits, how micro-batches add up and what compression moves were
chosen with runs like some of these in view.
*Inside* is the share of measured times in the 80 % interval whose width is taken, by technique, from the runs of the
*other* models, so that no run judges itself. Forecasts print the interval that all runs give: {widths}.
*Before* is the median error with the catalog's constants, of a machine that was not calibrated; four of five are then
within {catalog}.

"""


def report(found: Sequence[Case], refused: Sequence[Refused]) -> str:
    """The tables."""
    return "\n".join([*medians(found), "", "## Every plan", "", *table(found), *_refusals(refused), ""])


def write(found: Sequence[Case], refused: Sequence[Refused]) -> None:
    """Write the page and the spread."""
    told: dict[str, Any] = tomllib.loads(FILE.read_text(encoding="utf-8"))
    for name, error in (("own", log_error), ("catalog", _catalog_error)):
        spread = quantiles([(technique(one.plan), error(one)) for one in found])
        four_of_five = {key: round(value, 4) for key, value in spread.items()}
        told[name] = {"runs": len(found), "cores": cores(), "four_of_five": four_of_five}
    FILE.write_text(HEAD + tomli_w.dumps(told), encoding="utf-8")
    PAGE.write_text(page(found, refused, told), encoding="utf-8")


def page(found: Sequence[Case], refused: Sequence[Refused], told: dict[str, Any]) -> str:
    """The page of the documentation."""
    busy = [each.busy for one in found for each in one.rounds]
    widths = ", ".join(f"{_around(size)} ({name})" for name, size in told["own"]["four_of_five"].items())
    head = _HEAD.format(
        asked=max(len(one.rounds) for one in found),
        rounds=_span([len(one.rounds) for one in found]),
        when=f"{date.today():%B %Y}",
        cpu=_processor(),
        cores=cores(),
        steps=_steps(),
        busy=statistics.median(busy),
        most=max(busy),
        widths=widths,
        catalog=_around(told["catalog"]["four_of_five"]["all"]),
    )
    return head + report(found, refused)


def log_error(one: Case) -> float:
    """Logarithm of measured over forecast."""
    return math.log(one.measured / one.foretold.step)


def _catalog_error(one: Case) -> float:
    return math.log(one.measured / one.catalog.step)


def inside(one: Case, found: Sequence[Case]) -> bool:
    """Whether what was measured lies in the interval that runs of the other models give."""
    others = quantiles([(technique(other.plan), log_error(other)) for other in found if other.job != one.job])
    return abs(log_error(one)) <= quantile(others, technique(one.plan))


def medians(found: Sequence[Case]) -> list[str]:
    """Median errors: of all, by job, by processes and by kind of plan."""
    keys: tuple[Callable[[Case], str], ...] = (
        lambda one: "all",
        lambda one: one.job,
        lambda one: f"{one.plan.devices} process{'es' if one.plan.devices > 1 else ''}",
        lambda one: one.kind,
    )
    hits = {id(one): inside(one, found) for one in found} if len({one.job for one in found}) > 1 else {}
    lines = ["| of | plans | median error | nine of ten | bias | inside | before |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for key in keys:
        for name in dict.fromkeys(key(one) for one in found):
            mine = [one for one in found if key(one) == name]
            sizes = sorted(abs(one.error) for one in mine)
            most = sizes[min(len(sizes) - 1, math.ceil(0.9 * len(sizes)) - 1)]
            bias = statistics.median(one.error for one in mine)
            hit = f"{sum(hits[id(one)] for one in mine) / len(mine):.0%}" if hits else "–"
            before = statistics.median(abs(one.catalog.step / one.measured - 1) for one in mine)
            shown = f"{statistics.median(sizes):.1%} | {most:.0%} | {bias:+.1%} | {hit} | {before:.0%}"
            lines.append(f"| {name} | {len(mine)} | {shown} |")
    return lines


def table(found: Sequence[Case]) -> list[str]:
    """One row a plan."""
    lines = [
        "| job | plan | forecast, ms | measured, ms | rounds, ms | error | largest parts |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for one in found:
        parts = sorted(one.foretold.seconds.items(), key=lambda item: -item[1])[:3]
        text = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in parts)
        seconds = [each.seconds for each in one.rounds]
        rounds = f"{1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f}"
        times = f"{1e3 * one.foretold.step:.1f} | {1e3 * one.measured:.1f} | {rounds}"
        lines.append(f"| {one.job} | `{one.plan}` | {times} | {one.error:+.0%} | {text} |")
    return lines


def _refusals(refused: Sequence[Refused]) -> list[str]:
    if not refused:
        return []
    lines = ["", "## Not run", "", "| job | plan | why |", "| --- | --- | --- |"]
    return [*lines, *(f"| {job} | `{plan}` | {why.replace('|', '/')} |" for job, plan, why in refused)]


def _around(size: float) -> str:
    return f"{100 * (math.exp(-size) - 1):.0f} to {100 * (math.exp(size) - 1):+.0f} %"


def _span(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def _steps() -> int:
    from forecast_here import STEPS

    return STEPS - WARM_UP


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
