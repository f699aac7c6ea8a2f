"""Step ``calibrate``: a cluster file measured on this machine, and forecasts of earlier rows with it.

``phalanx calibrate`` measures CPU cores. For a GPU this step measures the constants of ``phalanx.forecast.rates``
that one device has: the share of the peak that products and attention reach, of the bandwidth that elementwise
kernels reach, the least time of a kernel, and the host's time for an operation.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from gpu_record.measure import best_of, catalog_cluster, device_memory_gib, forecasts, relative, synchronize
from gpu_record.report import Step
from gpu_record.workloads import workload

if TYPE_CHECKING:
    import phalanx as px

_TRAINING = ("llama_1b", "gpt2_124m", "lora_8b", "resnet50", "bert_base")


def run(step: Step) -> None:
    """Write the cluster file into the record, then forecast each training row with the catalog and with the file."""
    begun = time.monotonic()
    known = catalog_cluster(step.device)
    if known is None:
        step.skip("the catalog does not know this device")
        return
    found = measured(known) if step.device == "cuda" else _command()
    step.facts(cluster=found.to_toml(), seconds=round(time.monotonic() - begun, 2))
    for name in _TRAINING:
        rows = step.rows_of(name)
        if rows and step.left < 5:
            step.note(f"No time was left for {name}.")
        elif rows:
            _compare(step, name, rows, found)


def _compare(step: Step, name: str, rows: list[dict[str, Any]], found: px.Cluster) -> None:
    """Record the step's rows, each with its forecast by the catalog, which the step made, and by ``found``."""
    work = workload(name, small=step.small, memory_gib=device_memory_gib(step.device))
    job = work.job(steps=10, batch=step.facts_of(name).get("batch", 0))
    plans = {row["method"]: row["plan"] or f"compile=true {work.plan}" for row in rows}
    calibrated = forecasts(job, sorted(set(plans.values())), found)
    for row in rows:
        seconds, mine = row["step_seconds"], calibrated[plans[row["method"]]]["step_seconds"]
        by_catalog = (row.get("forecast") or {}).get("step_seconds")
        step.row(
            name,
            row["method"],
            model=row["model"],
            method=row["method"],
            measured_seconds=seconds,
            forecast_catalog=by_catalog,
            forecast_calibrated=mine,
            error_catalog=relative(by_catalog, seconds),
            error_calibrated=relative(mine, seconds),
        )


def _command() -> px.Cluster:
    """Run ``phalanx calibrate --quick`` and return one core of its file."""
    from phalanx.hardware import cluster

    with tempfile.TemporaryDirectory(prefix="gpu-record-calibrate-") as name:
        path = Path(name, "machine.toml")
        asked = [sys.executable, "-m", "phalanx", "calibrate", "--quick", "-o", str(path)]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip() or f"phalanx calibrate: exit code {done.returncode}")
        found = cluster(str(path))
    return replace(found, groups=(replace(found.groups[0], per_node=1),))


def measured(known: px.Cluster) -> px.Cluster:
    """Return ``known``, a GPU of the catalog, with what was measured on it; see ``Kernels`` for the names."""
    from phalanx.forecast.rates import rates

    group = known.groups[0]
    device, family = group.device, rates(group.device).kernels
    peak = device.peak["bf16"]
    floor, host = _launches()
    found = {
        "product": min(1.0, _product() / peak * (1 + family.depth / 8192)),
        "stream": min(1.0, _stream() / device.bandwidth),
        "floor": floor,
        "host": host,
    }
    forward, backward = _attention()
    found |= {"attention": min(1.0, forward / peak), "attention_backward": min(1.0, backward / peak)}
    mine = replace(device, name=f"{device.name}-measured", measured=found)
    return replace(known, groups=(replace(group, device=mine),))


def _product() -> float:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / best_of(lambda: a @ b, 10, "cuda")


def _stream() -> float:
    a, b = (torch.zeros(2**28, device="cuda") for _ in range(2))
    return 12 * 2**28 / best_of(lambda: torch.add(a, b, out=a), 10, "cuda")


def _launches() -> tuple[float, float]:
    """Return seconds of a kernel however small, and of the host for an eager operation."""
    small = torch.zeros(16, device="cuda")
    both = best_of(lambda: small.add_(1), 2000, "cuda")
    graph = torch.cuda.CUDAGraph()
    synchronize("cuda")
    with torch.cuda.graph(graph):
        for _ in range(200):
            small.add_(1)
    return best_of(graph.replay, 10, "cuda") / 200, both


def _attention() -> tuple[float, float]:
    """Return FLOP/s of fused causal attention, forward and backward, with heads of 128.

    Causal attention computes half of the products; backward has 2.5 times those of forward.
    """
    q, k, v = (torch.randn(4, 16, 2048, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    flops = 4 * 4 * 16 * 2048**2 * 128 / 2
    grad = torch.randn(4, 16, 2048, 128, device="cuda", dtype=torch.bfloat16)

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    once = best_of(forward, 10, "cuda")
    both = best_of(lambda: forward().backward(grad), 10, "cuda")
    return flops / once, 2.5 * flops / max(both - once, 1e-9)
