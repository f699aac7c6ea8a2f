"""What is read of a machine, from trees and texts that stand in for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from in_one_test import in_one_test
from phalanx import hardware
from phalanx.device_kinds import all_kinds, kind_named
from phalanx.hardware import probe
from phalanx.hardware.probe import Gpu
from phalanx.launch.check_hosts import host_probe

GIB = 2**30
NVSWITCH = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV12\tNV12\tPXB\t0-63\t0
GPU1\tNV12\t X \tNV12\tPXB\t0-63\t0
GPU2\tNV12\tNV12\t X \tSYS\t64-127\t1
NIC0\tPXB\tPXB\tSYS\t X \t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""
HYBRID = "\tGPU0\tGPU1\tGPU2\nGPU0\t X \tNV2\tSYS\nGPU1\tNV2\t X \tNV1\nGPU2\tSYS\tNV1\t X \n"
ISLANDS = (
    "\tGPU0\tGPU1\tGPU2\tGPU3\nGPU0\t X \tNV18\tSYS\tSYS\nGPU1\tNV18\t X \tSYS\tSYS\n"
    "GPU2\tSYS\tSYS\t X \tNV18\nGPU3\tSYS\tSYS\tNV18\t X \n"
)
PCIE = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPHB\t0-31\nGPU1\tPHB\t X \t0-31\n"
BRIDGE = "\tGPU0\tGPU1\nGPU0\t X \tNV4\nGPU1\tNV4\t X \n"


def tree(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def test_without_groups_all_is_allowed(tmp_path: Path) -> None:
    assert probe.cores_of(tmp_path, 12) == 12
    assert probe.memory_of(tmp_path, 64 * GIB) == 64 * GIB
    assert probe.numa_of(tmp_path) == 1
    assert probe.network_of(tmp_path) is None


@in_one_test(("quota", "cores"), [("250000 100000", 2), ("50000 100000", 1), ("max 100000", 12)])
def test_a_quota_limits_cores(quota: str, cores: int, tmp_path: Path) -> None:
    root = tree(tmp_path, **{"proc/self/cgroup": "0::/pod/box", "sys/fs/cgroup/pod/cpu.max": quota})
    assert probe.cores_of(root, 12) == cores


def test_the_lowest_limit_above_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/box",
        "sys/fs/cgroup/memory.max": "max",
        "sys/fs/cgroup/pod/memory.max": str(8 * GIB),
        "sys/fs/cgroup/pod/box/memory.max": str(16 * GIB),
    }
    assert probe.memory_of(tree(tmp_path, **files), 64 * GIB) == 8 * GIB


def test_the_first_version_of_groups(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/box\n1:cpu,cpuacct:/box",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(4 * GIB),
        "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "300000",
        "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000",
    }
    root = tree(tmp_path, **files)
    assert (probe.memory_of(root, 64 * GIB), probe.cores_of(root, 12)) == (4 * GIB, 3)


def test_the_fastest_interface_is_the_network(tmp_path: Path) -> None:
    interfaces = {"eth0": ("25000", "up"), "eth1": ("100000", "down"), "eth2": ("-1", "up"), "br0": ("200000", "up")}
    for name, (speed, state) in interfaces.items():
        folder = f"sys/class/net/{name}"
        tree(tmp_path, **{f"{folder}/speed": speed, f"{folder}/operstate": state})
        if name != "br0":
            (tmp_path / folder / "device").mkdir()
    network = probe.network_of(tmp_path)
    assert network is not None
    assert (network.name, network.bandwidth) == ("eth0, 25 Gb/s", 25e9 / 8)


def test_infiniband_ports_add_up(tmp_path: Path) -> None:
    for place, state in enumerate(["4: ACTIVE", "4: ACTIVE", "1: DOWN"]):
        port = f"sys/class/infiniband/mlx5_{place}/ports/1"
        tree(tmp_path, **{f"{port}/rate": "400 Gb/sec (4X NDR)", f"{port}/state": state})
    network = probe.network_of(tmp_path)
    assert network is not None
    assert (network.name, network.bandwidth) == ("2 x 400 Gb/s InfiniBand", 100e9)


@in_one_test(
    ("name", "gib", "found"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.15, "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", 39.39, "A100-PCIe-40GB"),
        ("NVIDIA A100 80GB PCIe", 79.15, "A100-PCIe-80GB"),
        ("NVIDIA H100 80GB HBM3", 79.11, "H100"),
        ("NVIDIA H100", 95.0, "H100-96GB-500W"),
        ("NVIDIA H200", 139.8, "H200"),
        ("NVIDIA GB200", 184.31, "GB200"),
        ("Tesla V100-SXM2-16GB", 15.77, "V100-16GB"),
        ("Tesla P100-PCIE-16GB", 15.89, "P100-PCIe"),
        ("Tesla T4", 14.56, "T4"),
        ("NVIDIA GeForce RTX 4090", 23.65, "RTX-4090"),
        ("AMD Instinct MI300X", 191.98, "MI300X"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9.5, "cuda"),
        ("NVIDIA RTX 5000 Ada Generation", 31.6, "cuda"),
        ("", 16, "cuda"),
    ],
)
def test_names_of_drivers_are_found(name: str, gib: float, found: str) -> None:
    gpu = Gpu(name=name, memory=round(gib * GIB))
    known = probe.matched(gpu)
    assert known.device.name == found
    assert probe.measured(gpu, known).room == gpu.memory - GIB // 2


@in_one_test(
    ("matrix", "count", "device", "link"),
    [
        (NVSWITCH, 3, "A100", "NVLink 3"),
        (HYBRID, 3, "V100", "NVLink 2"),
        (ISLANDS, 4, "H100", "PCIe 5.0 x16"),
        (PCIE, 2, "A100", "PCIe 4.0 x16"),
        (BRIDGE, 2, "RTX-3090", "NVLink bridge, 4 lanes"),
        (PCIE, 1, "A100", "NVLink 3"),
    ],
)
def test_links_are_those_of_the_matrix(matrix: str, count: int, device: str, link: str) -> None:
    assert probe.link_of(matrix, count, hardware.entry(device)).name == link


def test_gpus_make_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    same = [Gpu(name="NVIDIA A100-SXM4-80GB", memory=85_000_000_000)] * 3
    monkeypatch.setattr(probe, "_gpus", lambda kind: (*same, Gpu(name="Tesla T4", memory=15_600_000_000)))
    monkeypatch.setattr(probe, "_topology", lambda kind: "")
    found = hardware.this_machine()
    shape = {group.device.name: (group.nodes, group.per_node, group.link.name) for group in found.groups}
    assert shape == {"A100-80GB": (1, 3, "NVLink 3"), "T4": (1, 1, "PCIe 3.0 x16")}
    assert found.groups[0].host.cores == hardware.cores()
    assert found.groups[0].device.room == 85_000_000_000 - GIB // 2


DRIVER = """#!/bin/sh
case "$1" in
    --query-gpu=*) printf '0, H100, 81559, 1024, 550.1\\n1, H100, 81559, [N/A], 550.1\\n' ;;
    --query-compute-apps=*) echo 4242 ;;
    topo) echo matrix ;;
esac
"""


@pytest.mark.parametrize(
    ("tool", "told"),
    [
        (
            DRIVER,
            {
                "error": "",
                "devices": [
                    {"index": 0, "name": "H100", "total": 81559 * 2**20, "used": 1024 * 2**20},
                    {"index": 1, "name": "H100", "total": 81559 * 2**20, "used": 0},
                ],
                "driver": "550.1",
                "pids": ["4242"],
                "topology": "matrix",
            },
        ),
        ("#!/bin/sh\necho first\necho has failed\nexit 9\n", {"error": "has failed"}),
        ("", {}),
    ],
)
def test_drivers_are_asked_by_the_texts_of_their_kinds(
    tool: str, told: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drivers = {kind.name: kind.driver for kind in all_kinds() if kind.driver}
    (path,) = (tmp_path / kind.driver_tool for kind in all_kinds() if kind.driver_tool)
    if tool:
        path.write_text(tool)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if tool else str(tmp_path))
    nothing = {"error": "", "devices": [], "driver": "", "pids": [], "topology": ""}
    assert host_probe._gpus(drivers) == {**nothing, **told}
    assert kind_named("cuda").topology().strip() == told.get("topology", "")
