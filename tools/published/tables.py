"""The accuracy of forecasts in the terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from published.accuracy import Accuracy
from published.measures import measures


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
