"""Forecasts as JSON says them."""

from __future__ import annotations

from math import isfinite
from typing import Any

from phalanx.forecast import Forecast


def told(one: Forecast) -> dict[str, Any]:
    """A forecast: seconds, bytes, and what follows from them."""
    return {
        "plan": str(one.plan),
        "cluster": one.cluster,
        "devices": one.plan.devices,
        "fits": one.fits,
        "runs_out": one.runs_out,
        "train": f"train does not run this yet: {one.unrun}" if one.unrun else None,
        "step": one.step,
        "low": one.low,
        "high": one.high,
        "basis": one.basis,
        "seconds": one.seconds,
        "memory": one.memory,
        "allocated": one.allocated,
        "reserved": one.reserved,
        "room": one.room,
        "start": one.start,
        "host": one.host,
        "host_room": one.host_room if isfinite(one.host_room) else None,
        "samples": one.samples,
        "tokens": one.tokens,
        "samples_per_second": one.throughput,
        "tokens_per_second": one.throughput * one.tokens,
        "flops": one.flops,
        "mfu": one.mfu,
        "watts": one.watts or None,
        "limits": list(one.limits),
        "exact": one.plan.exactness,
        "notes": list(one.notes),
    }
