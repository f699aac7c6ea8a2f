"""Forecasts of what no constant has seen, as tables of the reference, and the spread that intervals rest on."""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from phalanx.forecast.uncertainty import HEAD
from published.foretold import Foretold
from published.left_out import LeftOut, Without, coverage, spread

_HEAD = """
## What no constant has seen

This is what a user may expect of the model of cost: a framework, or a family of devices, that no constant was fitted
on. Every constant is fitted anew, from physical defaults, on all other sources; of the framework only facts are used
(which kernels it joins, what it overlaps, what it sends in which precision). *Inside* is the share of measured times in
the 80 % interval whose width is taken from all other sources, each of which counts the same. Taken from all it is
{low:.0f} to {high:+.0f} % around the forecast, and {wide_low:.0f} to {wide_high:+.0f} % for a family of devices that
was never measured; these are the intervals that forecasts print.

"""


def left_out_page(found: LeftOut, own: Sequence[Foretold]) -> str:
    """Tables of what was left out; ``own`` are forecasts of the same rows with Phalanx's own preset."""
    around, wider = (_around(spread(groups)) for groups in (found.sources, found.devices))
    text = _HEAD.format(low=around[0], high=around[1], wide_low=wider[0], wide_high=wider[1])
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
    told: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    for name, groups in (("published", found.sources), ("unknown", found.devices)):
        runs = sum(len(one.found) for one in groups)
        told[name] = {"runs": runs, "groups": len(groups), "four_of_five": {"all": round(spread(groups), 4)}}
    path.write_text(HEAD + tomli_w.dumps(told), encoding="utf-8")
