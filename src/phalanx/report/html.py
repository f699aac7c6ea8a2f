"""A forecast, a ranking or a scaling curve as one HTML page with charts of plotly, which loads nothing."""

from __future__ import annotations

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
from phalanx.report.planner_tables import (
    curve_rows,
    fact_rows,
    neighbour_rows,
    plan_rows,
    sentences,
    short,
    shortfall_rows,
)
from phalanx.units import show_seconds, visible

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
    """Return the page of one plan."""
    one = found.forecast
    rows = {"plan": str(one.plan), "cluster": one.cluster, **fact_rows(one, found.bill, found.question.steps)}
    parts = [_facts(rows), *_missing(found.shortfall)]
    return _page(f"{name}: {one.plan}", parts, [memory_chart([one]), step_chart([one])])


def plan_page(name: str, advice: Advice) -> str:
    """Return the page of ranked plans: the explanation and the neighbours of the best."""
    ranking, explanation = advice.ranking, advice.explanation
    title = f"{name} on {ranking.question.cluster}"
    if explanation is None:
        none = f"<p>None of {ranking.search.considered:,} plans fits.</p>"
        return _page(title, [none, *_missing(advice.shortfall)], [])
    plans = ranking.plans
    parts = [
        _table(plan_rows(plans)),
        _facts(fact_rows(plans[0], ranking.bill, ranking.question.steps)) if ranking.bill else "",
        _list(explanation.reasons),
        _table(neighbour_rows(explanation.neighbours)),
    ]
    return _page(title, parts, [step_chart(plans), memory_chart(plans)])


def scale_page(name: str, curve: Curve) -> str:
    """Return the page of a scaling curve with its knee."""
    charts = [scaling_chart(curve), step_chart([one.forecast for one in curve.points])] if curve.points else []
    return _page(f"{name}: scaling", [_list(sentences(curve)), _table(curve_rows(curve.points, curve.steps))], charts)


def memory_chart(plans: Sequence[Forecast]) -> Chart:
    """Return a chart of GiB by part on the rank that needs most, with its limit."""
    data = _stacked({name: [one.memory[name] / _GIB for one in plans] for name in plans[0].memory}, plans)
    room = plans[0].room / _GIB
    line = {"type": "line", "x0": room, "x1": room, "y0": 0, "y1": 1, "yref": "paper", "line": {"dash": "dash"}}
    layout = {**_bars("memory of the rank that needs most", "GiB", len(plans)), "shapes": [line]}
    return {"data": data, "layout": layout}


def step_chart(plans: Sequence[Forecast]) -> Chart:
    """Return a chart of the seconds of a step, by part."""
    data = _stacked({PARTS[name]: [one.seconds[name] for one in plans] for name in plans[0].seconds}, plans)
    return {"data": data, "layout": _bars("time of a step", "seconds", len(plans))}


def scaling_chart(curve: Curve) -> Chart:
    """Return a chart of speed-up against devices, beside the ideal, with the knee and the number to stop at."""
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
    return [f"<p>{_escape(str(missing))}.</p>", _table(shortfall_rows(missing))] if missing else []


def _list(sentences: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{_escape(one)}</li>" for one in sentences) + "</ul>"


def _facts(rows: Mapping[str, str]) -> str:
    return _table([{"": name, " ": value} for name, value in rows.items() if value])


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    headings = [one.replace("-\n", "-").replace("\n", " ") for one in (rows[0] if rows else ())]
    head = "".join(f"<th>{_escape(one)}</th>" for one in headings)
    body = "".join("<tr>" + "".join(f"<td>{_escape(cell)}</td>" for cell in row.values()) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _page(title: str, parts: Iterable[str], charts: Sequence[Chart]) -> str:
    try:
        from plotly.graph_objects import Figure
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise MissingExtraError("plotly", "page") from None
    drawn = (Figure(one).to_html(full_html=False, include_plotlyjs=False) for one in charts)
    boxes = "".join(f'<div class="chart">{one}</div>' for one in drawn)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_escape(title)}</title>'
        f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script></head>"
        f"<body><h1>{_escape(title)}</h1>{''.join(parts)}{boxes}</body></html>\n"
    )


def _escape(text: str) -> str:
    return html_escape(visible(text))
