"""A forecast, a ranking or a scaling curve as one HTML page with charts, which needs nothing else to be read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape as html_escape
from math import log10
from typing import Any

from phalanx.errors import MissingExtraError
from phalanx.forecast import Forecast
from phalanx.planner.advise import Advice, PlanForecast
from phalanx.planner.explain import PARTS
from phalanx.planner.nearest_fit import Shortfall
from phalanx.planner.scale import Curve
from phalanx.report.planner_tables import columns, fact_rows, sentences, short
from phalanx.units import show_bytes, show_seconds, visible

_GIB = 2**30
_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid #8884; vertical-align: top }
.chart { background: white; border-radius: 6px; margin: 1rem 0 }
code { font-size: .92em }
""".strip()

Chart = dict[str, Any]
"""What plotly draws: ``data`` and ``layout``."""


def forecast_page(name: str, found: PlanForecast) -> str:
    """One plan."""
    one = found.forecast
    rows = [("plan", str(one.plan)), ("cluster", one.cluster), *fact_rows(one, found.bill, found.question.steps)]
    parts = [_table(("", ""), rows), *_missing(found.shortfall)]
    return _page(f"{name}: {one.plan}", parts, [memory_chart([one]), step_chart([one])])


def plan_page(name: str, advice: Advice) -> str:
    """Ranked plans, the explanation, and the best on fewer devices."""
    ranking = advice.ranking
    title = f"{name} on {ranking.question.cluster}"
    if advice.explanation is None:
        none = f"<p>None of {ranking.search.considered:,} plans fits.</p>"
        return _page(title, [none, *_missing(advice.shortfall)], [])
    plans, near = ranking.plans, advice.explanation.neighbours
    within = [f"{show_seconds(one.low)} to {show_seconds(one.high)}" for one in plans]
    unrun = [f" (train does not run this yet: {one.unrun})" if one.unrun else "" for one in plans]
    rows = [
        (f"{one.plan}{later}", show_seconds(one.step), between, f"{one.mfu:.1%}", show_bytes(one.reserved))
        for one, between, later in zip(plans, within, unrun, strict=True)
    ]
    costs = [(one.change, f"{one.slower:+.1%}" if one.forecast.fits else "-", one.why) for one in near]
    parts = [
        _table(("plan", "time per step", "4 of 5 within", "MFU", "memory of a rank"), rows),
        _table(("the first", ""), fact_rows(plans[0], ranking.bill, ranking.question.steps)) if ranking.bill else "",
        _list(advice.explanation.reasons),
        _table(("with", "time per step", "it would cost"), costs),
    ]
    return _page(title, parts, [step_chart(plans), memory_chart(plans)])


def scale_page(name: str, curve: Curve) -> str:
    """A scaling curve with its knee."""
    between = columns(curve)
    headings = ("devices", *(heading.replace("-\n", "").replace("\n", " ") for heading in between), "plan")
    each = zip(curve.points, zip(*between.values(), strict=True), strict=True)
    rows = [(str(one.devices), *cells, str(one.forecast.plan)) for one, cells in each]
    parts = [_list(sentences(curve)), _table(headings, rows)]
    charts = [scaling_chart(curve), step_chart([one.forecast for one in curve.points])] if curve.points else []
    return _page(f"{name}: scaling", parts, charts)


def memory_chart(plans: Sequence[Forecast]) -> Chart:
    """GiB of the rank that needs most, by part, with the room there is."""
    data = _stacked({name: [one.memory[name] / _GIB for one in plans] for name in plans[0].memory}, plans)
    room = plans[0].room / _GIB
    line = {"type": "line", "x0": room, "x1": room, "y0": 0, "y1": 1, "yref": "paper", "line": {"dash": "dash"}}
    layout = {**_bars("memory of the rank that needs most", "GiB", len(plans)), "shapes": [line]}
    return {"data": data, "layout": layout}


def step_chart(plans: Sequence[Forecast]) -> Chart:
    """Seconds of a step, by part."""
    data = _stacked({PARTS[name]: [one.seconds[name] for one in plans] for name in plans[0].seconds}, plans)
    return {"data": data, "layout": _bars("time of a step", "seconds", len(plans))}


def scaling_chart(curve: Curve) -> Chart:
    """Speed-up against devices, beside the ideal, with the knee and where to stop."""
    devices = [one.devices for one in curve.points]
    speed_ups = [one.speed_up for one in curve.points]
    text = [f"{one.forecast.plan}<br>{show_seconds(one.forecast.step)} a step" for one in curve.points]
    data: list[dict[str, Any]] = [
        {"name": "ideal", "x": devices, "y": [one / devices[0] for one in devices], "line": {"dash": "dot"}},
        {"name": "forecast", "x": devices, "y": speed_ups, "text": text, "mode": "lines+markers"},
    ]
    marks = [("knee", curve.knee), ("stop here", curve.stop)]
    notes = [
        {"x": log10(one.devices), "y": log10(one.speed_up), "text": name, "ay": -40 if name == "knee" else 40}
        for name, one in marks
        if one is not None
    ]
    axis = {"type": "log", "dtick": log10(2)}
    layout = {
        "title": {"text": "speed-up"},
        "xaxis": {**axis, "title": {"text": "devices"}},
        "yaxis": axis,
        "annotations": notes,
        "height": 480,
    }
    return {"data": data, "layout": layout}


def _stacked(series: Mapping[str, list[float]], plans: Iterable[Forecast]) -> list[dict[str, Any]]:
    labels = [f"{place}. {short(one.plan)}" for place, one in enumerate(plans, 1)]
    bar = {"type": "bar", "orientation": "h", "y": labels}
    return [{**bar, "name": name, "x": sizes} for name, sizes in series.items() if any(sizes)]


def _bars(title: str, unit: str, count: int) -> dict[str, Any]:
    return {
        "title": {"text": title},
        "barmode": "stack",
        "xaxis": {"title": {"text": unit}},
        "yaxis": {"autorange": "reversed", "automargin": True},
        "height": 260 + 36 * count,
    }


def _missing(missing: Shortfall | None) -> list[str]:
    if missing is None:
        return []
    rows = [(one.words, show_seconds(one.step), show_bytes(one.spare)) for one in missing.changes]
    return [f"<p>{_escape(str(missing))}.</p>", _table(("would fit", "time per step", "to spare"), rows)]


def _list(sentences: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{_escape(one)}</li>" for one in sentences) + "</ul>"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{_escape(one)}</th>" for one in columns)
    body = "".join("<tr>" + "".join(f"<td>{_escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _page(title: str, parts: Iterable[str], charts: Sequence[Chart]) -> str:
    boxes = "".join(f'<div class="chart" id="chart{index}"></div>' for index in range(len(charts)))
    drawn = json.dumps(charts).replace("<", "\\u003c")  # no end of the script, nor the begin of a comment in it
    script = f"{drawn}.forEach((one, at) => Plotly.newPlot('chart' + at, one.data, one.layout, {{responsive: true}}))"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_escape(title)}</title>'
        f"<style>{_STYLE}</style><script>{_plotly()}</script></head>"
        f"<body><h1>{_escape(title)}</h1>{''.join(parts)}{boxes}<script>{script}</script></body></html>\n"
    )


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise MissingExtraError("plotly", "page") from None
    return str(get_plotlyjs())


def _escape(text: str) -> str:
    return html_escape(visible(text))
