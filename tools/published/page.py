"""The accuracy of forecasts as a page of the reference: every measure, misses included, and what causes the largest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from published.accuracy import Accuracy, accuracy, source
from published.foretold import Foretold
from published.left_out import LeftOut, framework
from published.left_out_page import left_out_page
from published.measures import measures

_HEAD = """# Accuracy of forecasts beside published runs

Written by `python tools/validate.py measured.csv --page docs/reference/accuracy.md`, where `measured.csv` is a table
of {rows} published training runs, {oom} of which ran out of memory. Each becomes a model of standard modules, traced as
a user's own is, a plan and a cluster. None of them is a run of Phalanx: those that were measured are in
[Forecasts of this machine's own runs](accuracy-here.md).
"""

_FITTED = """
## With constants of each framework

How well the model of cost can follow a framework once it has seen it: the habits of each were fitted, with the
constants of devices and collectives, on one half of the rows, by a hash of their id. *Held out* is the other half. This
tests interpolation only: {known:.0%} of the held-out rows that were timed have a fitted row of the same model and
framework. What frameworks keep in memory was found with both halves in sight. Users' forecasts have the constants of
devices and collectives, but no framework's habits.

"""

_CAUSES = """
## What causes the largest misses

- **Rows that do not name their schedule** (ZeroBubble-Megatron): four schedules were measured for each configuration;
  the forecast is of the framework's own (zero bubble), so that 1F1B rows come out too fast.
- **Megatron-LM on H100**: micro-batch, chunks and recomputation are not stated; two rows state a pipeline of one stage
  for a model that does not fit on it. Its habits were set by hand with all eleven rows in sight.
- **DeepSpeed ZeRO-3** on 384 to 2,240 GPUs: gathers parameter by parameter; one constant of its own stands for that.
- **8-bit products with a scale for each row** (torchtitan) cost more than is known here; so do very long samples over
  `cp`.
- **BERT's second phase** is forecast for a mean length of its binned samples, which the source does not state.
"""


def write_page(path: Path, found: Sequence[Foretold], unseen: LeftOut, own: Sequence[Foretold]) -> None:
    """Write the page into ``path``."""
    path.write_text(page(found, unseen, own), encoding="utf-8")


def page(found: Sequence[Foretold], unseen: LeftOut, own: Sequence[Foretold]) -> str:
    """The page as Markdown.

    Args:
        found: forecasts with the habits that were fitted.
        unseen: forecasts of what no constant has seen.
        own: forecasts with Phalanx's own preset.
    """
    held = accuracy([one for one in found if not one.row.calibrated])
    fitted = accuracy([one for one in found if one.row.calibrated])
    head = _HEAD.format(rows=f"{len(found):,}", oom=sum(one.row.ran_out for one in found))
    half = _FITTED.format(known=known(found))
    tables = _bars(accuracy(found), held, fitted) + _sources(held, fitted) + _largest(found)
    return head + left_out_page(unseen, own) + half + tables + _CAUSES


def known(found: Sequence[Foretold]) -> float:
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


def _largest(found: Sequence[Foretold]) -> str:
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
