"""Clock, memory and forecasts of a step's process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import phalanx as px

WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuEventSynchronize",
    "hipStreamSynchronize",
    "hipDeviceSynchronize",
    "hipEventSynchronize",
)
"""Calls of CUDA and HIP by which the host waits for the device; ``.item()`` and blocking copies make the first."""


def synchronize(device: str) -> None:
    """Wait until the device has finished all it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object], count: int, device: str) -> float:
    """Return seconds of one call of ``work``, of ``count`` between two moments at which the device is idle."""
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(count):
        work()
    synchronize(device)
    return (time.perf_counter() - begun) / count


def median_seconds(work: Callable[[], object], count: int, device: str, rounds: int = 3) -> float:
    """Return the median of ``rounds`` of ``seconds_of``, after one call to warm up."""
    work()
    return statistics.median(seconds_of(work, count, device) for _ in range(rounds))


class Memory:
    """Memory of this process on its device; on the host its resident memory.

    Peaks on the host are those since ``reset``, if the kernel allows to reset them.
    """

    def __init__(self, device: str) -> None:
        self.device = device

    def held(self) -> int:
        """Return bytes in use now."""
        return torch.cuda.memory_allocated() if self.device == "cuda" else _resident("VmRSS")

    def reset(self) -> None:
        """Begin a new peak."""
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def peak(self) -> int:
        """Return the most bytes in use since ``reset``."""
        return torch.cuda.max_memory_allocated() if self.device == "cuda" else _resident("VmHWM")


def _resident(name: str) -> int:
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0


def device_memory_gib(device: str) -> float:
    """Return GiB of the device's memory."""
    if device != "cuda":
        return 0.0
    return torch.cuda.get_device_properties(0).total_memory / 2**30


def catalog_name(device: str) -> str:
    """Return the catalog's name for the device, or "" if it does not know it."""
    if device != "cuda":
        return "cpu"
    from phalanx.hardware.catalog import generic
    from phalanx.hardware.probe import Gpu, matched

    properties = torch.cuda.get_device_properties(0)
    found = matched(Gpu(name=properties.name, memory=properties.total_memory, kind="cuda")).device.name
    return "" if found == generic("cuda").device.name else found


def peak_flops(device: str) -> float | None:
    """Return FLOP/s of bf16 products by the catalog; ``None`` for a CPU, or a device it does not know."""
    name = catalog_name(device) if device == "cuda" else ""
    if not name:
        return None
    from phalanx.hardware.catalog import entry

    return entry(name).device.peak.get("bf16")


def catalog_cluster(device: str) -> px.Cluster | None:
    """Return one device of the catalog; ``None`` if it does not know this one."""
    from phalanx.hardware import cluster

    name = catalog_name(device)
    return cluster(f"1x{name}") if name else None


def forecasts(job: px.Job, plans: Iterable[str], cluster: px.Cluster) -> dict[str, dict[str, Any]]:
    """Map each plan to a row's ``forecast``: seconds with their interval, bytes at the peak, the costliest part.

    The same as ``px.forecast`` for each plan, but the model is looked at once.
    """
    from phalanx.config import Plan
    from phalanx.forecast import forecast
    from phalanx.preflight.subject import Subject

    subject, made = Subject.of(job), dict[str, dict[str, Any]]()
    for text in plans:
        plan = Plan.parse(text)
        found = forecast(subject.question(cluster, plan).work, plan, cluster)
        made[text] = {
            "step_seconds": found.step,
            "low_seconds": found.low,
            "high_seconds": found.high,
            "peak_bytes": int(found.allocated),
            "blame": ", ".join(found.limits),
        }
    return made


def relative(forecast: float | None, measured: float | None) -> float | None:
    """Return the excess of a forecast, as a share of the measured value."""
    return forecast / measured - 1 if forecast and measured else None


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Events of torch's profiler during some work.

    Attributes:
        events: all of them, but the mark around the work.
        waits: calls by which the host waited for the device while it gave it the work.
        seconds: until the device had finished it.
    """

    events: list[Any]
    waits: list[Any]
    seconds: float


_MARK = "gpu_record.work"


def profiled(work: Callable[[], object], device: str) -> Profile:
    """Profile ``work``; the wait for its end is none of its own."""
    from torch.profiler import ProfilerActivity, profile, record_function

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    synchronize(device)
    with profile(activities=kinds) as found:
        begun = time.perf_counter()
        with record_function(_MARK):
            work()
        synchronize(device)
        seconds = time.perf_counter() - begun
    events = list(found.events() or [])
    ends = [one.time_range.end for one in events if one.name == _MARK and not on_device(one)]
    until = max(ends, default=float("inf"))
    waits = [one for one in events if one.name in WAITS and one.time_range.start < until]
    return Profile(events=[one for one in events if one.name != _MARK], waits=waits, seconds=seconds)


def on_device(event: Any) -> bool:
    """Return True if a profiler's event is of the device's time line."""
    return str(event.device_type).endswith("CUDA")
