"""Step ``trace``: one step of the 1B Llama under the profiler: computing, gaps, waits, and the costliest kernels."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

from gpu_record.measure import WAITS, device_memory_gib, profiled, synchronize
from gpu_record.report import Step
from gpu_record.steps.methods import phalanx_steps
from gpu_record.workloads import workload

_WARM_UP, _COSTLIEST = 4, 5


def run(step: Step) -> None:
    """Profile the step after those that compile and warm up."""
    work = workload("llama_1b", small=step.small, memory_gib=device_memory_gib(step.device))
    take = phalanx_steps(work.job(step.device), f"compile=true {work.plan} device={step.device}")
    take(_WARM_UP)
    with profiled(step.device):  # the first use of the profiler costs seconds
        take(1)
    synchronize(step.device)
    with profiled(step.device) as profile:
        begun = time.perf_counter()
        take(1)
        synchronize(step.device)
        seconds = time.perf_counter() - begun
    step.facts(step_seconds=seconds, compute_share=None, launch_gap_share=None, host_wait_share=None)
    events = profile.events()
    kernels = _kernels(events) if step.device == "cuda" else _operations(events)
    busy = union([(start, end) for _, start, end in kernels]) if step.device == "cuda" else _total(kernels)
    step.facts(
        compute_share=busy / seconds,
        launch_gap_share=max(0.0, 1 - busy / seconds),
        host_wait_share=sum(_seconds(one) for one in events if one.name in WAITS) / seconds,
    )
    costs: dict[str, float] = defaultdict(float)
    for name, start, end in kernels:
        costs[name] += end - start
    for name, cost in sorted(costs.items(), key=lambda one: -one[1])[:_COSTLIEST]:
        step.row(name, kernel=name[:200], seconds=cost, share=cost / seconds)


def _seconds(event: Any) -> float:
    return (event.time_range.end - event.time_range.start) / 1e6


def _kernels(events: Any) -> list[tuple[str, float, float]]:
    return [
        (one.name, one.time_range.start / 1e6, one.time_range.end / 1e6)
        for one in events
        if str(one.device_type).endswith("CUDA") and not getattr(one, "is_user_annotation", False)
    ]


def _operations(events: Any) -> list[tuple[str, float, float]]:
    """Return operations of the host as spans from 0, each as long as it computed itself."""
    return [(one.name, 0.0, one.self_cpu_time_total / 1e6) for one in events if one.name.startswith("aten::")]


def _total(spans: list[tuple[str, float, float]]) -> float:
    return sum(end - start for _, start, end in spans)


def union(spans: list[tuple[float, float]]) -> float:
    """Return seconds that at least one span covers."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
