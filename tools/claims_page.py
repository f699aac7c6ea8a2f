"""Writes the page on published claims and its chart, with fresh forecasts: ``python tools/claims_page.py``."""

from __future__ import annotations

import math
import statistics
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from published.claims import CLAIMS, Claim, Point, Speed
from published.settings import Curve, Setting

EXPLANATION = Path(__file__).resolve().parents[1] / "docs" / "explanation"

_HEAD = """# Scaling

<!-- Written by `python tools/claims_page.py`; edits here are lost. -->

Twice the devices are never quite twice as fast. Each step ends with an exchange of gradients that one device did not
need; it grows with the parameters, not with the work, and crosses slower links as soon as a node is full. *Efficiency*
is the speed-up over what that many devices could give at most. What it comes to depends on the model, the batch, the
devices and their links, so a number without them says little.

[`phalanx scale`](../how-to/plan-before-you-rent.md#how-many-devices) forecasts the curve for a model of yours.

## Published claims, checked

Many tutorials repeat these numbers. Beside each stands what its source measured, and the forecast for the same setting,
as far as the source states it.

"""

_HOW = """
![Efficiency against devices, forecast and measured, for each claim](scaling.svg)

Lines are forecasts; bands are the range of four of five outcomes, were the first point right. Filled dots were
measured; rings are repeated without a measurement behind them.

How to read the forecasts:

- They come from the code behind `phalanx scale` and `phalanx forecast`: the model's operations, priced on the catalog's
  devices. Nothing was adjusted to the figures on this page.
- **No measurement on a P100 or a TPU went into any constant of the forecast.** These devices have the figures of their
  data sheets, and fall short of them as other families do. Their ranges are wide for that.
- Frameworks of those years differ from what is forecast: other kernels, other overlap of the exchange with the
  backward, and input pipelines that no forecast knows.
"""

_TAIL = """
## One that needs no forecast

*PyTorch has a `model_parallel` module.* It has none. Models are split with stages (`torch.distributed.pipelining`),
with DTensor, or by hand; Phalanx does it from a plan: [tensor](tensor.md), [pipeline](pipeline.md).
"""


def claims_page(curves: Sequence[Curve]) -> str:
    """The page as Markdown, with the forecasts ``curves`` of every setting of ``CLAIMS``."""
    found = {curve.setting: curve for curve in curves}
    own = {claim.title: [found[setting] for setting in claim.settings] for claim in CLAIMS}
    sections = "".join(_section(claim, own[claim.title]) for claim in CLAIMS)
    return _HEAD + _summary(own) + _HOW + _verdict(found) + sections + _TAIL


def forecast_claims() -> tuple[Curve, ...]:
    """The forecasts of every setting of ``CLAIMS``."""
    return tuple(Curve.of(setting) for claim in CLAIMS for setting in claim.settings)


def _summary(own: Mapping[str, Sequence[Curve]]) -> str:
    lines = ["| as repeated | what holds | efficiency stated | efficiency forecast |", "| --- | --- | --- | --- |"]
    for claim in CLAIMS:
        stated: list[str] = []
        forecast: list[str] = []
        for curve in own[claim.title]:
            points = [point for point in claim.points if point.setting == curve.setting]
            most = max((point.devices for point in points), default=curve.setting.counts[-1])
            where = f"{curve.setting.name} on {most:,}"
            shares = sorted({f"{100 * point.efficiency:.0f} %" for point in points if point.devices == most})
            if shares:
                stated.append(f"{where}: {' and '.join(shares)}")
            forecast.append(f"{where}: {100 * curve.efficiency(most):.0f} %")
        lines.append(f"| {claim.repeated} | {claim.verdict} | {'; '.join(stated)} | {'; '.join(forecast)} |")
    return "\n".join(lines) + "\n"


def _verdict(found: Mapping[Setting, Curve]) -> str:
    """How far forecasts and measurements are apart."""
    measured = [point for claim in CLAIMS for point in claim.points if point.measured]
    apart = [100 * (found[point.setting].efficiency(point.devices) - point.efficiency) for point in measured]
    mean, most = statistics.fmean(map(abs, apart)), max(range(len(apart)), key=lambda at: abs(apart[at]))
    where = f"{measured[most].setting.name} on {measured[most].devices:,}, {measured[most].source}"
    inside = [
        low <= point.efficiency <= high
        for point in measured
        for low, high in [found[point.setting].range(point.devices)]
    ]
    speeds = [(one, *_forecast_of(one)) for claim in CLAIMS for one in claim.speeds]
    held = sum(low <= one.value <= high for one, low, _, high in speeds)
    return "\n" + _wrapped(
        f"The {len(measured)} measured efficiencies and their forecasts are {mean:.0f} percentage points apart on"
        f" average, and at most {abs(apart[most]):.0f} ({where}); {sum(inside)} lie in the range. Of the {len(speeds)}"
        f" measured speeds and times, {held} do."
    )


def _section(claim: Claim, curves: Sequence[Curve]) -> str:
    parts = [
        f"\n## {claim.title}\n",
        _wrapped(f"*As repeated:* {claim.repeated}."),
        _wrapped(f"*What the source supports:* {claim.supported} Source: {claim.source}."),
        _wrapped(f"*What is forecast:* {claim.differs}"),
        _speed_ups(claim, curves),
    ]
    if claim.speeds:
        parts.append(_speeds(claim.speeds))
    return "\n".join(parts)


def _speed_ups(claim: Claim, curves: Sequence[Curve]) -> str:
    first = curves[0].setting.counts[0]
    over = "one" if first == 1 else str(first)
    lines = [
        f"| model | devices | step, forecast | range | speed-up over {over}, forecast | efficiency | stated speed-up |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for curve in curves:
        for count, found in zip(curve.setting.counts, curve.forecasts, strict=True):
            points = [one for one in claim.points if one.setting == curve.setting and one.devices == count]
            stated = "; ".join(f"{one.speed_up:.3g} ({one.source})" for one in points)
            times = f"{_seconds(found.step)} | {_seconds(found.low)} to {_seconds(found.high)}"
            gains = f"{curve.speed_up(count):.3g} | {100 * curve.efficiency(count):.0f} %"
            lines.append(f"| {curve.setting.name} | {count:,} | {times} | {gains} | {stated} |")
    return "\n".join(lines) + "\n"


def _speeds(speeds: Sequence[Speed]) -> str:
    lines = ["| model | devices | figure | measured | forecast | range |", "| --- | ---: | --- | ---: | ---: | ---: |"]
    for one in speeds:
        low, middle, high = _forecast_of(one)
        shown = f"{_three(middle)} | {_three(low)} to {_three(high)}"
        lines.append(f"| {one.setting.name} | {one.devices:,} | {one.word} | {one.stated} | {shown} |")
    return "\n".join(lines) + "\n"


def _forecast_of(speed: Speed) -> tuple[float, float, float]:
    """The forecast of a speed, between both ends of its range."""
    found = speed.setting.forecast(speed.devices)
    low, high = sorted((speed.of_step(found.low), speed.of_step(found.high)))
    return low, speed.of_step(found.step), high


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _three(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{float(f'{value:.3g}'):,.10g}" if value < 1000 else f"{float(f'{value:.3g}'):,.0f}"


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


def pages() -> dict[Path, str]:
    """What belongs into each file."""
    curves = forecast_claims()
    return {EXPLANATION / "scaling.md": claims_page(curves), EXPLANATION / "scaling.svg": claims_chart(curves)}


def main() -> int:
    """Forecast every claim and write both files."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(EXPLANATION.parents[1])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
