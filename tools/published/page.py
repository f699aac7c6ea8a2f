"""How accuracy is shown: the page of the reference, with misses and what causes them, and the terminal's tables."""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Group, RenderableType
from rich.table import Table

from published.accuracy import Accuracy, Comparison, accuracy, source
from published.left_out import LeftOut, Without, coverage, framework, spread
from published.spread import HEAD

_HEAD = """# Accuracy of forecasts beside published runs

Written by `python tools/validate.py measured.csv --page docs/project/accuracy.md`, where `measured.csv` is a table
of {rows} published training runs, {oom} of which ran out of memory. Each becomes a model of standard modules, traced as
a user's own is, a plan and a cluster. None of them is a run of Phalanx: those that were measured are in
[Forecasts of this machine's own runs](accuracy-here.md).
"""

_FITTED = """
## With constants of each framework

How well the model of cost can follow a framework once it has seen it: the presets of each were fitted, with the
constants of devices and collectives, on one half of the rows, by a hash of their id. *Held out* is the other half. This
tests interpolation only: {known:.0%} of the held-out rows that were timed have a fitted row of the same model and
framework. What frameworks keep in memory was found with both halves in sight. Users' forecasts have the constants of
devices and collectives, but no framework's preset.

"""

_CAUSES = """
## What causes the largest misses

- **Rows that do not name their schedule** (ZeroBubble-Megatron): four schedules were measured for each configuration;
  the forecast is of the framework's own (zero bubble), so that 1F1B rows come out too fast.
- **Megatron-LM on H100**: micro-batch, chunks and recomputation are not stated; two rows state a pipeline of one stage
  for a model that does not fit on it. Its preset was set by hand with all eleven rows in sight.
- **DeepSpeed ZeRO-3** on 384 to 2,240 GPUs: gathers parameter by parameter; one constant of its own stands for that.
- **8-bit products with a scale for each row** (torchtitan) cost more than is known here; so do very long samples over
  `cp`.
- **BERT's second phase** is forecast for a mean length of its binned samples, which the source does not state.
"""

_UNSEEN = """
## What no constant has seen

This is what a user may expect of the model of cost: a framework, or a family of devices, that no constant was fitted
on. Every constant is fitted anew, from physical defaults, on all other sources; of the framework only facts are used
(which kernels it joins, what it overlaps, what it sends in which precision). *Inside* is the share of measured times in
the 80 % interval whose width is taken from all other sources, each of which counts the same. Taken from all it is
{low:.0f} to {high:+.0f} % around the forecast, and {wide_low:.0f} to {wide_high:+.0f} % for a family of devices that
was never measured; these are the intervals that forecasts print.

"""


def write_page(path: Path, found: Sequence[Comparison], unseen: LeftOut, own: Sequence[Comparison]) -> None:
    """Write the page into ``path``."""
    path.write_text(page(found, unseen, own), encoding="utf-8")


def page(found: Sequence[Comparison], unseen: LeftOut, own: Sequence[Comparison]) -> str:
    """The page as Markdown.

    Args:
        found: forecasts with the presets that were fitted.
        unseen: forecasts of what no constant has seen.
        own: forecasts with Phalanx's own preset.
    """
    held = accuracy([one for one in found if not one.row.calibrated])
    fitted = accuracy([one for one in found if one.row.calibrated])
    head = _HEAD.format(rows=f"{len(found):,}", oom=sum(one.row.ran_out for one in found))
    half = _FITTED.format(known=known(found))
    tables = _bars(accuracy(found), held, fitted) + _sources(held, fitted) + _largest(found)
    return head + left_out_page(unseen, own) + half + tables + _CAUSES


def known(found: Sequence[Comparison]) -> float:
    """The share of held-out rows, of those that were timed, whose model was fitted on in the same framework."""
    timed = [one for one in found if one.row.step and not one.row.ran_out]
    fitted = {(one.subject.shape, framework(one.row)) for one in timed if one.row.calibrated}
    held = [(one.subject.shape, framework(one.row)) for one in timed if not one.row.calibrated]
    return sum(one in fitted for one in held) / len(held) if held else 0.0


def _bars(every: Accuracy, held: Accuracy, fitted: Accuracy) -> str:
    lines = [
        "| measure | asked | all rows | held out | fitted | reached on all, held out | best peers |",
        "| --- | --- | ---: | ---: | ---: | --- | --- |",
    ]
    for one, two, three in zip(measures(every), measures(held), measures(fitted), strict=True):
        reached = ", ".join("yes" if each.reached else "**no**" for each in (one, two))
        shown = f"{one.shown} | {two.shown} | {three.shown}"
        lines.append(f"| {one.name} | {one.asked} | {shown} | {reached} | {one.peer or '–'} |")
    return "\n".join(lines) + "\n"


def _sources(held: Accuracy, fitted: Accuracy) -> str:
    lines = [
        "\n## Step time by source\n",
        "| source | rows | mean | median | nine of ten | bias | mean, fitted half |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, errors in held.sources.items():
        other = f"{100 * fitted.sources[name].mean:.1f} %" if name in fitted.sources else "–"
        shown = " | ".join(f"{100 * value:.1f} %" for value in (errors.mean, errors.median, errors.most))
        lines.append(f"| {name} | {errors.rows} | {shown} | {100 * errors.bias:+.1f} % | {other} |")
    return "\n".join(lines) + "\n"


def _largest(found: Sequence[Comparison]) -> str:
    timed = [one for one in found if one.row.step and not one.row.ran_out]
    worst = sorted(timed, key=lambda one: -abs(one.error))[:12]
    lines = [
        "\n## The largest errors\n",
        "| row | source | plan | measured | forecast | error |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for one in worst:
        times = f"{one.row.step:.3g} s | {one.forecast.step:.3g} s | {100 * one.error:+.0f} %"
        lines.append(f"| {one.row.id} | {source(one.row)} | `{one.subject.plan}` | {times} |")
    return "\n".join(lines) + "\n"


def left_out_page(found: LeftOut, own: Sequence[Comparison]) -> str:
    """Tables of what was left out; ``own`` are forecasts of the same rows with Phalanx's own preset."""
    around, wider = (_around(spread(groups)) for groups in (found.sources, found.devices))
    text = _UNSEEN.format(low=around[0], high=around[1], wide_low=wider[0], wide_high=wider[1])
    text += _table("framework left out", found.sources) + "\n" + _table("family of devices left out", found.devices)
    sizes = [abs(one.error) for one in own]
    inside = sum(one.inside for one in own) / len(own)
    return text + (
        "\nWith Phalanx's own preset in place of each framework's facts, as `phalanx forecast` prices these "
        f"configurations, {len(own):,} rows are off by {statistics.median(sizes):.1%} in the median, and {inside:.0%} "
        "are in the interval that is printed. No run of Phalanx on GPUs is among them: none has been measured yet.\n"
    )


def left_out_summary(found: LeftOut) -> dict[str, Any]:
    """For JSON: by group the median error and the share inside, the spreads, and the constants."""
    return {
        name: {
            "spread": spread(groups),
            "groups": {
                one.source: {
                    "rows": len(one.found),
                    "median": statistics.median(abs(each.error) for each in one.found),
                    "inside": inside,
                }
                for one, inside in zip(groups, coverage(groups).values(), strict=True)
            },
        }
        for name, groups in (("sources", found.sources), ("devices", found.devices))
    } | {"constants": found.constants}


def _around(size: float) -> tuple[float, float]:
    return 100 * (math.exp(-size) - 1), 100 * (math.exp(size) - 1)


def _table(heading: str, groups: Sequence[Without]) -> str:
    lines = [
        f"| {heading} | rows | median | nine of ten | bias | inside |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    inside = coverage(groups)
    for one in groups:
        errors = [each.error for each in one.found]
        lines.append(f"| {one.source} | {len(errors):,} | {_row(errors, inside[one.source])} |")
    rows = [each.error for one in groups for each in one.found]
    hit = sum(inside[one.source] * len(one.found) for one in groups) / len(rows)
    lines.append(f"| all, by row | {len(rows):,} | {_row(rows, hit)} |")
    medians = [statistics.median(abs(each.error) for each in one.found) for one in groups]
    mean = statistics.fmean(inside.values())
    lines.append(
        f"| all, each counts the same | {len(rows):,} | {statistics.median(medians):.1%} | – | – | {mean:.0%} |"
    )
    return "\n".join(lines) + "\n"


def _row(errors: Sequence[float], inside: float) -> str:
    sizes = sorted(abs(one) for one in errors)
    most = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
    return f"{statistics.median(sizes):.1%} | {most:.1%} | {statistics.median(errors):+.1%} | {inside:.0%}"


def write_spread(path: Path, found: LeftOut) -> None:
    """Write what intervals rest on into ``path``; what own runs say stays as it is."""
    measured: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    for name, groups in (("published", found.sources), ("unknown", found.devices)):
        runs = sum(len(one.found) for one in groups)
        measured[name] = {"runs": runs, "groups": len(groups), "four_of_five": {"all": round(spread(groups), 4)}}
    path.write_text(HEAD + tomli_w.dumps(measured), encoding="utf-8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """One measure.

    Attributes:
        name: what is measured.
        peer: what the best other tools reach on the same or similar rows.
        least: the lowest value that is good enough.
        most: the highest.
        value: reached; not a number where no row is of this kind.
    """

    name: str
    peer: str
    least: float
    most: float
    value: float

    @property
    def reached(self) -> bool:
        """Whether the value is good enough."""
        return not math.isnan(self.value) and self.least <= self.value <= self.most

    @property
    def asked(self) -> str:
        """The bounds in words."""
        if self.least > 0 and self.most < 1:
            return f"{100 * self.least:.0f}–{100 * self.most:.0f} %"
        return f"≥ {100 * self.least:.0f} %" if self.least > 0 else f"≤ {100 * self.most:.0f} %"

    @property
    def shown(self) -> str:
        """The value as a share."""
        return "–" if math.isnan(self.value) else f"{100 * self.value:.1f} %"


_SOURCES = (
    ("sequence-parallel paper, Table 5", "calculon 3.65 %, SimuMax 5.6 %, llm-analysis 25.6 %", 0.03),
    ("SC21 Table 1", "SimuMax 7.7 %, calculon 10.3 %", 0.05),
    ("Megatron-DeepSpeed, 64-512 GPUs", "SimuMax 13.5 %, vTrain 14.7 %, calculon 19.6 %", 0.06),
    ("Megatron-DeepSpeed, <= 8 GPUs", "vTrain 8.4 %, SimuMax 25.9 %, calculon 38.9 %", 0.07),
)


def measures(found: Accuracy) -> tuple[Measure, ...]:
    """Every measure for ``found``; step times are mean absolute errors unless they say otherwise."""

    def at_most(name: str, peer: str, most: float, value: float) -> Measure:
        return Measure(name=name, peer=peer, least=0.0, most=most, value=value)

    def at_least(name: str, peer: str, least: float, value: float) -> Measure:
        return Measure(name=name, peer=peer, least=least, most=1.0, value=value)

    sources = [
        at_most(f"step time, {name}", peer, most, found.sources[name].mean if name in found.sources else math.nan)
        for name, peer, most in _SOURCES
    ]
    random = "" if math.isnan(found.choice.random) else f", a random pick {100 * found.choice.random:.0f} %"
    return (
        *sources,
        at_most("step time, the rest, median", "SimuMax 16.5 %, calculon 21.5 %", 0.08, found.rest.median),
        at_most("step time, the rest, nine of ten", "", 0.20, found.rest.most),
        at_least("fits or not, layout sweep", "calculon 84 %, SimuMax 84 %", 0.95, found.feasible),
        at_least("runs that ran are forecast to fit", "", 0.99, found.ran),
        at_most(
            "regret of the plan picked, mean", f"SimuMax 6.2 %, calculon 10.5 %{random}", 0.03, found.choice.regret
        ),
        at_least("groups in which the best is picked", "", 0.70, found.choice.best),
        at_most("peak memory, median", "", 0.05, found.memory.median),
        Measure(name="measured times in the 80 % interval", peer="", least=0.75, most=0.85, value=found.inside),
    )


def accuracy_view(held: Accuracy, fitted: Accuracy) -> RenderableType:
    """Two tables: each measure beside its bar, and the errors of step times by source."""
    bars = Table(title="forecast against published runs", title_justify="left")
    for name in ("measure", "asked", "held out", "fitted", "best peers"):
        bars.add_column(name, justify="left" if name in ("measure", "best peers") else "right")
    for one, other in zip(measures(held), measures(fitted), strict=True):
        style = "" if one.reached else "yellow"
        bars.add_row(one.name, one.asked, one.shown, other.shown, one.peer, style=style)
    sources = Table(title="errors of the step time by source, held out", title_justify="left")
    for name in ("source", "rows", "mean", "median", "nine of ten", "bias"):
        sources.add_column(name, justify="left" if name == "source" else "right")
    for name, errors in held.sources.items():
        shown = [f"{100 * value:.1f} %" for value in (errors.mean, errors.median, errors.most)]
        sources.add_row(name, str(errors.rows), *shown, f"{100 * errors.bias:+.1f} %")
    return Group(bars, sources)
