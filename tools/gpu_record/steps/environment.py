"""Step ``environment``: the device, its software, and how fast it multiplies and copies."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import torch

from gpu_record.measure import median_seconds, peak_flops
from gpu_record.report import Step

_ASKED = {
    "driver": "driver_version",
    "sm_mhz": "clocks.max.sm",
    "memory_mhz": "clocks.max.memory",
    "power_limit_w": "power.limit",
}


def run(step: Step) -> None:
    """Record facts one by one: a fact that cannot be had is ``None``."""
    step.facts(
        torch=torch.__version__,
        python=platform.python_version(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        compiler=shutil.which("cc") or shutil.which("gcc") or "",
        driver=None,
        sm_mhz=None,
        memory_mhz=None,
        power_limit_w=None,
    )
    if step.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        step.facts(
            gpu=properties.name,
            gpus=torch.cuda.device_count(),
            memory_bytes=properties.total_memory,
            capability=f"{properties.major}.{properties.minor}",
        )
        step.facts(**_driver())
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        step.facts(gpu=f"CPU ({platform.machine()})", gpus=0, memory_bytes=memory, capability="")
    peak = _or_none(lambda: peak_flops(step.device))
    step.facts(peak_tflops=peak / 1e12 if peak else None)
    step.facts(matmul_tflops=_or_none(lambda: matmul(step.device)))
    step.facts(copy_gbps=_or_none(lambda: copy(step.device)))


def matmul(device: str) -> float:
    """Return TFLOP/s of a product of square matrices: 8192 in bf16, on a CPU 512 in fp32."""
    size, dtype, count = (8192, torch.bfloat16, 10) if device == "cuda" else (512, torch.float32, 5)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / median_seconds(lambda: torch.mm(a, b, out=out), count, device) / 1e12


def copy(device: str) -> float:
    """Return GB/s of a copy on the device, bytes read plus bytes written."""
    size = 2**31 if device == "cuda" else 2**26
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_seconds(lambda: target.copy_(source), 10, device) / 1e9


def _driver() -> dict[str, Any]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    asked = [tool, f"--query-gpu={','.join(_ASKED.values())}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        text = subprocess.run(asked, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    told = zip(_ASKED, (value.strip() for value in text.split(",")), strict=False)
    return {name: value if name == "driver" else _number(value) for name, value in told}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return None


def _or_none(work: Callable[[], float | None]) -> float | None:
    try:
        return work()
    except Exception as error:  # one measurement less
        print(f"{type(error).__name__}: {error}")
        return None
