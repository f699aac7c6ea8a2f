"""Forecasts as JSON says them."""

from __future__ import annotations

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
        "step": one.step,
        "low": one.low,
        "high": one.high,
        "basis": one.basis,
        "seconds": one.seconds,
        "memory": one.memory,
        "allocated": one.allocated,
        "reserved": one.reserved,
        "room": one.room,
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
