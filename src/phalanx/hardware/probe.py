"""What this machine has."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path

from phalanx.hardware.catalog import entry
from phalanx.hardware.gpus import Gpu, link_of, matched, measured
from phalanx.hardware.system import affinity, cores_of, memory_of, network_of, numa_of
from phalanx.spec import Cluster, Group, Host

_ROOT = Path("/")
_ASK_TORCH = """
import json, torch
found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
print(json.dumps([[one.name, one.total_memory] for one in found]))
"""


def cuda_devices() -> int:
    """CUDA devices here. Asked through NVML: initialising CUDA here would keep workers from being forked."""
    import torch

    return torch.cuda.device_count()


def cores() -> int:
    """CPU cores this process may use: those of its affinity, or its control group's quota where lower."""
    return cores_of(_ROOT, affinity())


def memory_bytes() -> int:
    """Bytes of host memory this process may use: the machine's, or a control group's limit where lower."""
    return memory_of(_ROOT, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def this_machine() -> Cluster:
    """The devices of this machine: its CUDA devices, else its CPU cores, each good for one process.

    What cannot be read here is the catalog's: peak and bandwidth of all devices, and all of a GPU it does not know.
    GPUs of several kinds in one machine are told as groups of their own.
    """
    host = Host(name="this machine", cores=cores(), memory=memory_bytes(), numa=numa_of(_ROOT))
    found = network_of(_ROOT)
    network = found or entry("cpu").network(1)
    return Cluster(groups=_gpu_groups(host, _gpus(), _topology()) or (cpu_group(host),), network=network)


def cpu_group(host: Host) -> Group:
    """The cores of ``host`` as devices; each has an equal share of its memory."""
    known = entry("cpu")
    count = host.cores or 1
    memory = (host.memory or known.device.memory * count) // count
    device = replace(known.device, memory=memory, kept=min(known.device.kept, memory))
    return Group(device=device, link=known.link, host=replace(host, slots=count), per_node=count)


def _gpu_groups(host: Host, gpus: Sequence[Gpu], matrix: str) -> tuple[Group, ...]:
    groups: list[Group] = []
    for _, alike in groupby(sorted(gpus, key=lambda one: (one.name, one.memory)), key=lambda one: one.name):
        same = list(alike)
        known = matched(same[0])
        groups.append(
            Group(
                device=measured(same[0], known),
                link=link_of(matrix, len(gpus), known),
                host=replace(host, slots=len(same), link=known.host.link),
                per_node=len(same),
            )
        )
    return tuple(groups)


def _gpus() -> tuple[Gpu, ...]:
    count = cuda_devices()
    if count == 0:
        return ()
    unknown = tuple(Gpu(name="", memory=entry("cuda").device.memory) for _ in range(count))
    return _asked_elsewhere() or unknown


@cache
def _asked_elsewhere() -> tuple[Gpu, ...]:
    # names and memory cost an initialised CUDA, which this process must not have before it forks
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=120, check=True
        )
        return tuple(Gpu(name=name, memory=memory) for name, memory in json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return ()


def _topology() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        return subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


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
