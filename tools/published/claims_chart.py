"""Efficiency against devices for published claims: forecasts as lines with bands, stated numbers as dots, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

from published.claims import CLAIMS, Claim, Point
from published.settings import Curve, Setting

_WIDTH, _COLUMNS = 720, 2
_PANEL, _TALL = 360, 208  # of one panel
_LEFT, _TOP, _ACROSS, _DOWN = 48, 46, 286, 124  # of the axes in it
_MOST = 1.25  # efficiency at the top of an axis
# Told apart on light and on dark pages.
_COLOURS, _GREY = ("#3f6fb5", "#b5652f"), "#7d7d7d"


def claims_chart(curves: Sequence[Curve]) -> str:
    """One panel for each of ``CLAIMS``, in which all ``curves`` of its settings are drawn."""
    parts: list[str] = []
    for index, claim in enumerate(CLAIMS):
        left, top = _PANEL * (index % _COLUMNS), _TALL * (index // _COLUMNS)
        own = [curve for curve in curves if curve.setting in claim.settings]
        parts += [f'<g transform="translate({left} {top})">', *_panel(claim, own), "</g>"]
    rows = len(CLAIMS) // _COLUMNS + 1
    left, top = _PANEL * (len(CLAIMS) % _COLUMNS), _TALL * (len(CLAIMS) // _COLUMNS)
    body = "\n".join([*parts, f'<g transform="translate({left} {top})">', *_legend(), "</g>"])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_TALL * rows}" font-size="12"'
        f' font-family="Helvetica, Arial, sans-serif">\n{body}\n</svg>\n'
    )


def _panel(claim: Claim, curves: Sequence[Curve]) -> list[str]:
    parts = [f'<text x="{_LEFT}" y="16" fill="{_GREY}" font-weight="bold">{claim.title}</text>']
    at = _LEFT
    for curve, colour in zip(curves, _COLOURS, strict=False):
        name = f"{curve.setting.name}, {curve.setting.device}"
        parts.append(f'<text x="{at}" y="32" fill="{colour}">{name}</text>')
        at += 150
    parts += _axes(curves[0].setting)
    for curve, colour in zip(curves, _COLOURS, strict=False):
        parts += _line(curve, colour)
    for curve, colour in zip(curves, _COLOURS, strict=False):
        parts += [_dot(point, colour) for point in claim.points if point.setting == curve.setting]
    return parts


def _legend() -> list[str]:
    x, colour = _LEFT, _COLOURS[0]
    marks = (
        (f'<path d="M{x} %dh26" stroke="{colour}" stroke-width="2"/>', "efficiency, forecast"),
        (f'<path d="M{x} %dh26" stroke="{colour}" stroke-width="12" stroke-opacity="0.16"/>', "four of five outcomes"),
        (f'<circle cx="{x + 13}" cy="%d" r="4" fill="{colour}" stroke="{colour}"/>', "measured"),
        (f'<circle cx="{x + 13}" cy="%d" r="4" fill="none" stroke="{colour}"/>', "repeated, not measured"),
        (f'<path d="M{x} %dh26" stroke="{_GREY}" stroke-width="0.6" stroke-dasharray="4 3"/>', "linear"),
    )
    parts: list[str] = []
    for index, (mark, meaning) in enumerate(marks):
        y = _TOP + 24 * index
        parts += [mark % y, f'<text x="{x + 38}" y="{y + 4}" fill="{_GREY}">{meaning}</text>']
    return parts


def _axes(setting: Setting) -> list[str]:
    parts: list[str] = []
    for share in (0.0, 0.5, 1.0):
        y = _y(share)
        dashes = ' stroke-dasharray="4 3"' if share == 1 else ""
        parts.append(f'<path d="M{_LEFT} {y}h{_ACROSS}" stroke="{_GREY}" stroke-width="0.6"{dashes}/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" fill="{_GREY}" text-anchor="end">{100 * share:.0f} %</text>')
    for count in _ticks(setting.counts):
        x = _x(count, setting)
        parts.append(f'<text x="{x}" y="{_TOP + _DOWN + 16}" fill="{_GREY}" text-anchor="middle">{count:,}</text>')
    return parts


def _line(curve: Curve, colour: str) -> list[str]:
    setting = curve.setting
    ranges = [(1.0, 1.0), *(curve.range(count) for count in setting.counts[1:])]
    across = [_x(count, setting) for count in setting.counts]
    upper = [f"{x} {_y(high)}" for x, (_, high) in zip(across, ranges, strict=True)]
    lower = [f"{x} {_y(low)}" for x, (low, _) in zip(across, ranges, strict=True)]
    band = "L".join([*upper, *reversed(lower)])
    line = "L".join(f"{x} {_y(curve.efficiency(count))}" for x, count in zip(across, setting.counts, strict=True))
    return [
        f'<path d="M{band}Z" fill="{colour}" fill-opacity="0.16"/>',
        f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="2"/>',
    ]


def _dot(point: Point, colour: str) -> str:
    x, y = _x(point.devices, point.setting), _y(point.efficiency)
    fill = colour if point.measured else "none"
    what = f"{point.source}: {point.speed_up:.3g} times on {point.devices:,}"
    return f'<circle cx="{x}" cy="{y}" r="4" fill="{fill}" stroke="{colour}"><title>{what}</title></circle>'


def _ticks(counts: Sequence[int]) -> list[int]:
    """The last, and before it those that lie twice or more below the one after."""
    shown: list[int] = []
    for count in reversed(counts):
        if not shown or 2 * count <= shown[-1]:
            shown.append(count)
    return shown


def _x(devices: int, setting: Setting) -> float:
    first, last = math.log2(setting.counts[0]), math.log2(setting.counts[-1])
    return round(_LEFT + _ACROSS * (math.log2(devices) - first) / (last - first), 1)


def _y(efficiency: float) -> float:
    return round(_TOP + _DOWN * (1 - min(efficiency, _MOST) / _MOST), 1)
