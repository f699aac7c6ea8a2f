"""Published claims on scaling as a page of the explanation: as repeated, as measured, and as forecast."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping, Sequence

from published.claims import CLAIMS, Claim, Speed
from published.settings import Curve, Setting

_HEAD = """# Scaling

<!-- Written by `python tools/scaling.py`; edits here are lost. -->

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
        foretold: list[str] = []
        for curve in own[claim.title]:
            points = [point for point in claim.points if point.setting == curve.setting]
            most = max((point.devices for point in points), default=curve.setting.counts[-1])
            where = f"{curve.setting.name} on {most:,}"
            shares = sorted({f"{100 * point.efficiency:.0f} %" for point in points if point.devices == most})
            if shares:
                stated.append(f"{where}: {' and '.join(shares)}")
            foretold.append(f"{where}: {100 * curve.efficiency(most):.0f} %")
        lines.append(f"| {claim.repeated} | {claim.verdict} | {'; '.join(stated)} | {'; '.join(foretold)} |")
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
    speeds = [(one, *_foretold(one)) for claim in CLAIMS for one in claim.speeds]
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
        low, middle, high = _foretold(one)
        shown = f"{_three(middle)} | {_three(low)} to {_three(high)}"
        lines.append(f"| {one.setting.name} | {one.devices:,} | {one.word} | {one.stated} | {shown} |")
    return "\n".join(lines) + "\n"


def _foretold(speed: Speed) -> tuple[float, float, float]:
    """The forecast of a speed, between both ends of its range."""
    found = speed.setting.forecast(speed.devices)
    low, high = sorted((speed.foretold(found.low), speed.foretold(found.high)))
    return low, speed.foretold(found.step), high


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _three(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{float(f'{value:.3g}'):,.10g}" if value < 1000 else f"{float(f'{value:.3g}'):,.0f}"
