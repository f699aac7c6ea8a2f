"""Step ``trace``: one step of the 1B Llama under the profiler: computing, gaps, waits, and the costliest kernels."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from gpu_record.measure import device_memory_gib, on_device, profiled
from gpu_record.report import Step
from gpu_record.steps.methods import phalanx_steps
from gpu_record.workloads import workload

_WARM_UP, _COSTLIEST = 4, 5


def run(step: Step) -> None:
    """Profile the step after those that compile and warm up."""
    work = workload("llama_1b", small=step.small, memory_gib=device_memory_gib(step.device))
    batch = step.earlier("llama_1b")["facts"].get("batch", work.batch)  # smaller if memory ran out there
    take = phalanx_steps(work.job(batch=batch), f"compile=true {work.plan} device={step.device}")
    take(_WARM_UP)
    profiled(lambda: take(1), step.device)  # the first use of the profiler costs seconds
    found = profiled(lambda: take(1), step.device)
    seconds = found.seconds
    step.facts(step_seconds=seconds, compute_share=None, launch_gap_share=None, host_wait_share=None)
    kernels = _kernels(found.events) if step.device == "cuda" else _operations(found.events)
    busy = union([(start, end) for _, start, end in kernels]) if step.device == "cuda" else _total(kernels)
    step.facts(
        compute_share=busy / seconds,
        launch_gap_share=max(0.0, 1 - busy / seconds),
        host_wait_share=sum(one.time_range.end - one.time_range.start for one in found.waits) / 1e6 / seconds,
    )
    costs: dict[str, float] = defaultdict(float)
    for name, start, end in kernels:
        costs[name] += end - start
    for name, cost in sorted(costs.items(), key=lambda one: -one[1])[:_COSTLIEST]:
        step.row(name, kernel=name[:200], seconds=cost, share=cost / seconds)


def _kernels(events: list[Any]) -> list[tuple[str, float, float]]:
    """Return kernels and copies of the device, without the spans of host annotations."""
    return [
        (one.name, one.time_range.start / 1e6, one.time_range.end / 1e6)
        for one in events
        if on_device(one)
        and not getattr(one, "is_user_annotation", False)
        and not one.name.startswith(("##", "Profiler"))
    ]


def _operations(events: list[Any]) -> list[tuple[str, float, float]]:
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
