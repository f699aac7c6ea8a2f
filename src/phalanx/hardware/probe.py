"""The hardware of this machine, from its operating system, its GPUs' driver and its allocator.

The operating system reports cores, memory, NUMA nodes and network adapters. Every function takes the root of the file
system, so that tests can pass another tree.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path

from phalanx.config import Cluster, Device, Group, Host, Link, Network
from phalanx.device_kinds import DeviceKind, accelerator, all_kinds, kind_of_hardware
from phalanx.hardware.catalog import CatalogEntry, context, entry, find, generic, names

_ROOT = Path("/")


def cores() -> int:
    """Return CPU cores this process may use: those of its affinity, or its control group's quota if lower."""
    return cores_of(_ROOT, affinity())


def memory_bytes() -> int:
    """Return bytes of host memory this process may use: the machine's, or a control group's limit if lower."""
    return memory_of(_ROOT, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def this_machine(kind: DeviceKind | None = None) -> Cluster:
    """Return the devices of this machine: its accelerators, else its CPU cores, a process for each.

    ``kind``: of the accelerators; by default that of ``device=auto``.

    Figures that cannot be read here are the catalog's: peak and bandwidth of all devices, and all figures of unknown
    GPUs. GPUs of several kinds in one machine are separate groups.
    """
    nodes = len([*(_ROOT / "sys/devices/system/node").glob("node[0-9]*")])  # none if the system does not say
    host = Host(name="this machine", cores=cores(), memory=memory_bytes(), numa=max(1, nodes))
    found = network_of(_ROOT)
    network = found or entry("cpu").network(1)
    return Cluster(groups=_gpu_groups(host, _gpus(kind), _topology(kind)) or (cpu_group(host),), network=network)


def cpu_group(host: Host) -> Group:
    """Return the cores of ``host`` as devices; each has an equal share of its memory."""
    known = entry("cpu")
    count = host.cores or 1
    memory = (host.memory or known.device.memory * count) // count
    device = replace(known.device, memory=memory, kept=min(known.device.kept, memory))
    return Group(device=device, link=known.link, host=replace(host, slots=count), per_node=count)


def cpu_processes(group: Group, count: int, had: float, host: Host) -> Group:
    """Return ``count`` processes as devices of a ``host`` with cores like those of ``group``, ``had`` cores each.

    Each has an equal share of the host's memory.
    """
    core = group.device
    memory = (host.memory or core.memory * (host.cores or count)) // count
    device = replace(
        core,
        peak={name: had * peak for name, peak in core.peak.items()},
        bandwidth=had * core.bandwidth,
        memory=memory,
        kept=min(core.kept, memory),
    )
    return replace(group, nodes=1, device=device, host=host, per_node=count)


def _gpu_groups(host: Host, gpus: Sequence[Gpu], matrix: str) -> tuple[Group, ...]:
    groups: list[Group] = []
    for _, alike in groupby(sorted(gpus, key=lambda one: (one.name, one.memory)), key=lambda one: one.name):
        same = list(alike)
        known = matched(same[0])
        around = replace(host, slots=len(same), link=known.host.link)
        link = link_of(matrix, len(gpus), known)
        groups.append(Group(device=measured(same[0], known), link=link, host=around, per_node=len(same)))
    return tuple(groups)


def _gpus(kind: DeviceKind | None = None) -> tuple[Gpu, ...]:
    kind = kind or accelerator()
    if kind is None or kind.on_host or not kind.count():
        return ()
    unknown = Gpu(name="", memory=generic(kind.name).device.memory, kind=kind.name)
    return _asked_elsewhere(kind) or (unknown,) * kind.count()


@cache
def _asked_elsewhere(kind: DeviceKind) -> tuple[Gpu, ...]:
    # names and memory cost a device that is begun to be used, which this process must not do before it forks
    asked = [sys.executable, "-c", kind.listing]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=True)
        told = json.loads(done.stdout.splitlines()[-1])
        return tuple(Gpu(name=name, memory=memory, kind=kind.name) for name, memory in told)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return ()


def _topology(kind: DeviceKind | None) -> str:
    kind = kind or accelerator()
    return kind.topology() if kind else ""


def peak_memory() -> int:
    """Return the largest memory of this process, in bytes: allocated on its accelerator, else its resident set."""
    for kind in all_kinds():
        if kind.in_use() and (memory := kind.memory()):
            return memory.peak
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


_MAKERS = r"^(NVIDIA|Tesla|Quadro|GeForce|AMD|Instinct|Radeon)[ -]+"
_LANE, _SLOW_LANE = 25e9, 14.0625e9  # bytes per second and direction: NVLink 2 to 4, and the bridges of GA102 cards
_SLOW_LANES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One device as the driver reports it: ``NVIDIA A100-SXM4-80GB``, and the bytes of memory it offers.

    ``kind``: its name in plans; empty if the catalog gives it.
    """

    name: str
    memory: int
    kind: str = ""


def matched(gpu: Gpu) -> CatalogEntry:
    """Return the catalog's entry for a device, or the generic one of its kind."""
    name = gpu.name.strip()
    while (shorter := re.sub(_MAKERS, "", name, flags=re.IGNORECASE)) != name:
        name = shorter
    found = find(name) or find(f"{name}-{round(gpu.memory / 2**30)}GB")
    if found and _fits(gpu, found.device):
        return found
    # one name, several sizes: such as an H100 with 96 GB
    family = name.split()[0].split("-")[0].lower() if name else ""
    same = [one for one in map(entry, names()) if one.device.name.lower().split("-")[0] == family]
    fitting = [one for one in same if found and _fits(gpu, one.device)]
    return min(fitting, key=lambda one: one.device.memory - gpu.memory, default=generic(gpu.kind))


def measured(gpu: Gpu, found: CatalogEntry) -> Device:
    """Return the entry's device, with the memory that the driver offers on this one."""
    known = found.device.name != generic(gpu.kind).device.name
    size = max(found.device.memory, gpu.memory) if known else gpu.memory
    kept = min(size, size - gpu.memory + context(found.device.kind))
    kind = gpu.kind if gpu.kind and kind_of_hardware(found.device.kind).name != gpu.kind else found.device.kind
    return replace(found.device, memory=size, kept=kept, kind=kind)


def link_of(matrix: str, count: int, found: CatalogEntry) -> Link:
    """Return the link between ``count`` GPUs, from the matrix of ``nvidia-smi topo -m``; without it the catalog's.

    NVLink counts if it leads from every GPU to every other, perhaps over others: rings follow it. Else it is PCIe.
    """
    rows = _rows(matrix)
    if count < 2 or len(rows) < count:
        return found.link
    lanes = [[int(cell[2:]) if re.fullmatch(r"NV\d+", cell) else 0 for cell in row] for row in rows]
    if not _connected(lanes):
        return found.host.link or found.link
    if found.link.name.startswith("NVLink"):
        return found.link
    fewest = min(max(row) for row in lanes)
    bandwidth = fewest * (_SLOW_LANE if fewest <= _SLOW_LANES else _LANE)
    latency = entry("H100").link.latency
    return Link(name=f"NVLink bridge, {fewest} lanes", bandwidth=bandwidth, latency=latency)


def _connected(lanes: list[list[int]]) -> bool:
    reached, new = {0}, [0]
    while new:
        here = new.pop()
        fresh = [there for there, count in enumerate(lanes[here]) if count and there not in reached]
        reached.update(fresh)
        new += fresh
    return len(reached) == len(lanes)


def _rows(matrix: str) -> list[list[str]]:
    plain = re.sub(r"\x1b\[[\d;]*m", "", matrix)
    lines = [line.split() or [""] for line in plain.splitlines()]
    rows = [line for line in lines if re.fullmatch(r"GPU\d+", line[0]) and "X" in line[1:]]
    return [row[1 : len(rows) + 1] for row in rows]


def _fits(gpu: Gpu, device: Device) -> bool:
    return 0.88 * device.memory < gpu.memory <= device.memory


_UNLIMITED = 2**60  # version 1 of control groups writes a huge number where there is no limit


def cores_of(root: Path, allowed: int) -> int:
    """Return cores a process may use: those ``allowed`` by affinity, or its control group's quota if lower."""
    return max(1, min([allowed, *(int(quota) for quota in _quotas(root))]))


def memory_of(root: Path, total: int) -> int:
    """Return bytes of host memory a process may use: ``total``, or the limit of a control group above it if lower."""
    limits = [
        int(text)
        for folder in (*_groups(root, ""), *_groups(root, "memory"))
        for name in ("memory.max", "memory.limit_in_bytes")
        if (text := _read(folder / name)).isdigit() and int(text) < _UNLIMITED
    ]
    return min([total, *limits])


def network_of(root: Path) -> Network | None:
    """Return the network of the host: all InfiniBand ports together, else its fastest interface, or ``None``.

    A group over TCP uses one interface, NCCL every InfiniBand port. Latencies are the catalog's.
    """
    ports = [rate for rate in map(_port_rate, (root / "sys/class/infiniband").glob("*/ports/*")) if rate]
    if ports:
        name = f"{len(ports)} x {max(ports) / 1e9:g} Gb/s InfiniBand"
        return Network(name=name, bandwidth=sum(ports) / 8, latency=entry("H100").adapter.latency)
    speeds = {one.name: speed for one in _interfaces(root) if (speed := _number(one / "speed")) > 0}
    if not speeds:
        return None
    name, megabits = max(speeds.items(), key=lambda item: item[1])
    label = f"{name}, {megabits / 1000:g} Gb/s"
    return Network(name=label, bandwidth=megabits * 1e6 / 8, latency=entry("cpu").adapter.latency)


def _interfaces(root: Path) -> Iterator[Path]:
    # bridges, tunnels and loopback have no device behind them
    for one in sorted((root / "sys/class/net").glob("*")):
        if (one / "device").exists() and _read(one / "operstate") in ("up", "unknown"):
            yield one


def _port_rate(port: Path) -> float | None:
    found = re.match(r"([\d.]+) Gb/sec", _read(port / "rate"))
    return float(found.group(1)) * 1e9 if found and "ACTIVE" in _read(port / "state") else None


def _quotas(root: Path) -> Iterator[float]:
    for folder in _groups(root, ""):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            yield int(quota) / int(period)
    for controller in ("cpu", "cpu,cpuacct"):
        for folder in _groups(root, controller):
            quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
            if quota > 0 and period > 0:
                yield quota / period


def _groups(root: Path, controller: str) -> Iterator[Path]:
    mounted = root / "sys/fs/cgroup" / controller
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == controller:
            folder = mounted / path.lstrip("/")
            yield from (one for one in (folder, *folder.parents) if one.is_relative_to(mounted) and one != mounted)
    yield mounted


def _number(path: Path) -> int:
    text = _read(path)
    return int(text) if re.fullmatch(r"-?\d+", text) else 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # a file that is not there, or an interface that is down
        return ""


def affinity() -> int:
    """Return the cores the scheduler may put this process on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_RETURNED, _KEPT = 2**20, 2**25  # 32 MiB is where glibc's own, growing threshold ends


def return_freed_memory() -> None:
    """Make pieces of 1 MiB and more go back to the kernel when they are freed.

    glibc otherwise raises that size, up to 32 MiB, with each freed piece. The memory that sharding gathers and drops in
    each step would then leave holes in the heap, and the resident set would grow to several times the held bytes. Costs
    page faults; has no effect with another C library.
    """
    _set_thresholds(_RETURNED)


def keep_freed_memory() -> None:
    """Undo ``return_freed_memory``: pieces up to 32 MiB stay in the heap, as glibc does in the long run."""
    _set_thresholds(_KEPT)


def _set_thresholds(size: int) -> None:
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, size)
    mallopt(_M_TRIM_THRESHOLD, 2 * size)
