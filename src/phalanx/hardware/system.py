"""What the operating system says of this host: cores, memory, NUMA nodes and network adapters.

Every function takes the root of the file system, so that another tree can stand in for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from phalanx.hardware.catalog import entry
from phalanx.spec import Network

_UNLIMITED = 2**60  # version 1 of control groups writes a huge number where there is no limit


def cores_of(root: Path, allowed: int) -> int:
    """Cores a process may use: those it is ``allowed`` by affinity, or its control group's quota where lower."""
    return max(1, min([allowed, *(int(quota) for quota in _quotas(root))]))


def memory_of(root: Path, total: int) -> int:
    """Bytes of host memory a process may use: ``total``, or the limit of a control group above it where lower."""
    limits = [
        int(text)
        for folder in (*_groups(root, ""), *_groups(root, "memory"))
        for name in ("memory.max", "memory.limit_in_bytes")
        if (text := _read(folder / name)).isdigit() and int(text) < _UNLIMITED
    ]
    return min([total, *limits])


def numa_of(root: Path) -> int:
    """NUMA nodes of the host, 1 where the system does not say."""
    return max(1, len([*(root / "sys/devices/system/node").glob("node[0-9]*")]))


def network_of(root: Path) -> Network | None:
    """The network of the host: all InfiniBand ports together, else its fastest interface; ``None`` if none says.

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
    """The folder of this process's control group and those above it, which limit it, too."""
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
    """Cores the scheduler may put this process on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
