"""One work on one device of each kind: its ideal speed, its forecast speed, and its bound."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from phalanx.forecast import Forecast, Work, forecast
from phalanx.forecast.kernels import itemsize
from phalanx.hardware import cluster
from phalanx.planner.explain import PARTS
from phalanx.planner.question import Question, precision_for
from phalanx.planner.scale import forecast_to_dict
from phalanx.planner.search import search
from phalanx.trace import flops


@dataclass(frozen=True, kw_only=True, slots=True)
class RooflinePoint:
    """A work on one device. Williams et al. 2009, "Roofline", sections 3 and 4."""

    device: str
    precision: str  # computed in
    intensity: float  # FLOP for each byte that the model's operations move
    ridge: float  # the intensity from which on the device is bound by arithmetic
    attainable: float  # FLOP/s under the roofline: of the peak and of bandwidth times intensity the lesser
    forecast: Forecast | None  # under the fastest plan of one device; ``None`` where none fits
    missing: float  # bytes that the leanest lacks; 0 if one fits
    # ``arithmetic``, ``bandwidth``, or ``memory`` where it does not fit
    bound: Literal["arithmetic", "bandwidth", "memory"]
    most: str  # the largest part of the step, with its share; empty if it does not fit

    def to_dict(self) -> dict[str, Any]:
        names = ("device", "precision", "intensity", "ridge", "attainable", "missing", "bound", "most")
        own = {name: getattr(self, name) for name in names}
        return {**own, "forecast": forecast_to_dict(self.forecast) if self.forecast else None}


def rooflines(work: Work, devices: Iterable[str]) -> list[RooflinePoint]:
    """Return the point of ``work`` on one of each named device, in their order."""
    return [_lined(work, name) for name in devices]


def intensity(work: Work, samples: float, size: float) -> float:
    """Return FLOP for each byte moved in one forward and backward of ``samples``, each kernel by itself.

    ``size`` is bytes of an element. For products the factors and the result count, for the rest the traffic of kernels.
    """
    computed = moved = 0.0
    length = work.tokens
    for part, operation in work.profile.operations():
        computed += part.count * flops(operation, samples, length)
        sizes = [one.at(samples, length) for one in operation.dims]
        if operation.kind in ("matmul", "convolution"):
            batch, m, n, k = sizes[:4]
            moved += part.count * size * batch * (m * k + k * n + m * n)
        elif operation.kind == "attention":
            count, heads, fewer, queries, keys, width = sizes[:6]
            moved += part.count * size * 2 * count * width * (heads * queries + fewer * keys)
        else:
            moved += part.count * size * operation.traffic.at(samples, length)
    return computed / moved if moved else 0.0


def _lined(work: Work, name: str) -> RooflinePoint:
    there = cluster(name)
    device, precision = there.groups[0].device, precision_for(there)
    found = search(Question(work=work, cluster=there, precision=precision))
    plan = found.best or found.leanest
    samples = float(plan.micro or work.batch) if plan else float(work.batch)
    reached = intensity(work, samples, itemsize(precision))
    best = forecast(work, found.best, there) if found.best else None
    missing = max(0.0, found.least - device.room) if best is None else 0.0
    ridge = device.ridge(precision)
    return RooflinePoint(
        device=name,
        precision=precision,
        intensity=reached,
        ridge=ridge,
        attainable=min(device.peak[precision], reached * device.bandwidth),
        forecast=best,
        missing=missing,
        bound="memory" if best is None else "arithmetic" if reached >= ridge else "bandwidth",
        most=_most(best) if best else "",
    )


def _most(best: Forecast) -> str:
    name = max(best.seconds, key=lambda one: best.seconds[one])
    return f"{PARTS[name]} {best.seconds[name] / best.step:.0%}"
