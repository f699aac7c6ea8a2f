"""Plot of forecast against measured, both logarithmic, as the text of an SVG file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

# Readable on light and on dark pages.
_GREY, _COLOURS = "#7d7d7d", ("#3f6fb5", "#b5652f", "#8457a8", "#3c8a5c")
_LEFT, _SIDE, _LINE = 72, 360, 14
_WIDTH, _LONGEST = 760, 48
_TICKS = [digit * 10.0**power for power in range(-9, 16) for digit in (1, 2, 5)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One training row.

    Attributes:
        series: index of its record.
    """

    label: str
    measured: float
    forecast: float
    series: int = 0


def plot(title: str, points: Sequence[Point], show: Callable[[float], str], series: Sequence[str]) -> str:
    """Return the SVG: a labelled point per training row, and the line on which forecasts are exact.

    Args:
        show: text of a tick.
        series: name of each record, in the order of its index.
    """
    ticks = _ticks([value for point in points for value in (point.measured, point.forecast)])
    low, high = math.log10(ticks[0]), math.log10(ticks[-1])

    def along(value: float) -> float:
        return _SIDE * (math.log10(value) - low) / (high - low)

    top, right = 42 + _LINE * len(series), _LEFT + _SIDE
    bottom = top + _SIDE
    parts = [_text(4, 16, title, 'font-weight="bold"')]
    for index, name in enumerate(series):
        parts.append(_text(4, 32 + _LINE * index, name, color=_COLOURS[index % len(_COLOURS)]))
    for tick in ticks if len(ticks) < 8 else [each for each in ticks if math.log10(each).is_integer()]:
        x, y = _LEFT + along(tick), bottom - along(tick)
        parts.append(f'<path d="M{x:.1f} {top}v{_SIDE}M{_LEFT} {y:.1f}h{_SIDE}" stroke="{_GREY}" stroke-width="0.3"/>')
        parts.append(_text(x, bottom + 16, show(tick), 'text-anchor="middle" class="x"'))
        parts.append(_text(_LEFT - 6, y + 4, show(tick), 'text-anchor="end" class="y"'))
    parts.append(f'<path d="M{_LEFT} {bottom}L{right} {top}" stroke="{_GREY}" stroke-dasharray="4 3"/>')
    parts.append(_text(right, bottom + 34, "measured", 'text-anchor="end"'))
    parts.append(_text(_LEFT - 6, top - 6, "forecast", 'text-anchor="end"'))
    placed = sorted(points, key=lambda point: -point.forecast)
    last = -math.inf
    for point in placed:
        x, y = _LEFT + along(point.measured), bottom - along(point.forecast)
        last = max(y, last + _LINE)
        color = _COLOURS[point.series % len(_COLOURS)]
        parts.append(f'<path d="M{x:.1f} {y:.1f}L{right + 10} {last:.1f}" stroke="{color}" stroke-width="0.4"/>')
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"><title>{escape(point.label)}</title></circle>'
        )
        parts.append(_text(right + 14, last + 4, point.label[:_LONGEST], color=color))
    height = max(bottom + 44, math.ceil(last) + 12)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-size="12" fill="none"'
    return "\n".join([f'{head} font-family="Helvetica, Arial, sans-serif">', *parts, "</svg>", ""])


def _ticks(values: Sequence[float]) -> list[float]:
    first = max(index for index, tick in enumerate(_TICKS) if tick <= min(values))
    after = min(index for index, tick in enumerate(_TICKS) if tick >= max(values))
    return list(itertools.islice(_TICKS, first, max(after, first + 1) + 1))


def _text(x: float, y: float, text: str, more: str = "", *, color: str = _GREY) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" {more}>{escape(text)}</text>'
