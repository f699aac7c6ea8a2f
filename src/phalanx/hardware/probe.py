"""What this machine has."""

from __future__ import annotations

import os
import resource

from phalanx.hardware.text import cluster
from phalanx.spec import Cluster


def cuda_devices() -> int:
    """CUDA devices here. Asked through NVML: initialising CUDA here would keep workers from being forked."""
    import torch

    return torch.cuda.device_count()


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Bytes of host memory this process may use: the machine's, or the control group's limit where lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            limit = file.read().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def this_machine() -> Cluster:
    """The devices of this machine: its CUDA devices, else its CPU cores, each good for one process."""
    count = cuda_devices()
    return cluster(f"{count}xcuda" if count else f"{cores()}xcpu")


def peak_memory() -> int:
    """Largest memory this process has held, in bytes: allocated on its CUDA device, else its resident set."""
    import torch

    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
