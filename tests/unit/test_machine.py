"""What is read of a machine, and its constants, found again from sweeps that are made up by their laws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from law_rows import in_one_test
from phalanx import hardware
from phalanx.cli.app import main
from phalanx.config import Cluster, Host, Network
from phalanx.device_kinds import all_kinds, kind_named
from phalanx.forecast.network import Fabric, collective
from phalanx.forecast.rates import Core, Wires, rates
from phalanx.hardware import calibrate, cluster, probe
from phalanx.hardware.calibrate import Sweeps, busy_share, calibrated
from phalanx.hardware.probe import Gpu, cpu_group
from phalanx.hardware.sweeps import MeasuredExchange, Measurement
from phalanx.launch import check_probe

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
    --query-gpu=*) printf '550.1\\n550.1\\n' ;;
    topo) echo matrix ;;
esac
"""


@pytest.mark.parametrize(
    ("tool", "told"),
    [
        (
            DRIVER,
            {"driver_devices": 2, "driver": "550.1", "topology": "matrix\n"},
        ),
        ("#!/bin/sh\necho first\necho has failed\nexit 9\n", {"driver_error": "has failed"}),
        ("", {}),
    ],
)
def test_drivers_are_asked_by_their_kinds(
    tool: str, told: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = (tmp_path / kind.driver_tool for kind in all_kinds() if kind.driver_tool)
    if tool:
        path.write_text(tool)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if tool else str(tmp_path))
    nothing = {"driver_error": "", "driver_devices": 0, "driver": "", "topology": ""}
    assert check_probe._driver() == {**nothing, **told}
    assert kind_named("cuda").topology() == told.get("topology", "")


def test_a_device_that_does_not_compute_is_probed_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H100")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (70, 80))
    monkeypatch.setattr(torch, "ones", lambda *shape, device: [][device.index])
    versions, (device,) = check_probe._probed(kind_named("cuda"))
    assert {*versions} <= {*kind_named("cuda").versions}
    assert device == {"index": 0, "name": "H100", "free": 70, "total": 80, "error": "list index out of range"}


PEAK, OPERAND, FLOOR = 150e9, 3e-10, 2e-6
NEAR, FAR, CACHE, FRESH = 80e9, 12e9, 4e6, 3e-10
SHAPES = [(32, 256, 64), (8, 1024, 1024), (512, 384, 384), (1024, 1024, 1024), (1024, 1024, 64)]
COUNTS = (10_000, 100_000, 200_000, 400_000, 1_000_000, 3_000_000)


def made_up(*, returned: bool = False, slower: float = 1.0) -> list[Measurement]:
    """A sweep of a machine whose constants are known."""
    points = [
        Measurement(kind="floor", name="call", sizes=(1.0,), seconds=FLOOR),
        Measurement(kind="floor", name="linear", sizes=(120.0,), seconds=120 * 7e-6),
    ]
    for name, peak in (("fp32", PEAK), ("bf16", PEAK / 2)):
        for m, n, k in SHAPES:
            seconds = FLOOR + 2 * m * n * k / peak + OPERAND * (m * n + m * k + n * k)
            points.append(Measurement(kind="product", name=name, sizes=(m, n, k), seconds=slower * seconds))
    for m, n, k in ((25088, 32, 9), (25088, 32, 288), (6272, 64, 576)):
        flops = 2 * m * n * k
        for backward, turns in ((False, 1), (True, 2)):
            seconds = FLOOR + turns * flops / (0.8 * PEAK) * (1 + 20 / min(m, n, k))
            points.append(
                Measurement(kind="convolution", name="fp32", sizes=(m, n, k), seconds=seconds, backward=backward)
            )
    for backward, flops in ((False, 4), (True, 10)):
        seconds = FLOOR + flops / 2 * 8 * 4 * 64**2 * 32 / (0.25 * PEAK)
        points.append(
            Measurement(kind="attention", name="fp32", sizes=(8, 4, 64, 32), seconds=seconds, backward=backward)
        )
    points += [
        Measurement(kind="stream", name="add", sizes=(3 * count, 4 * count), seconds=slower * _stream(count, returned))
        for count in COUNTS
    ]
    gelu = FLOOR + _traffic(4 * 2e5) + 2e5 * 2e-10
    points.append(Measurement(kind="named", name="gelu", sizes=(2e5, 1e5), seconds=gelu))
    for name, each in (("adamw", 5e-9), ("sgd", 1e-9)):
        for tensors, count in ((20, 20_000), (8, 4_800_000)):
            seconds = tensors * 4e-5 + count * (each + (2e-9 if returned else 0.0))
            points.append(Measurement(kind="optimizer", name=name, sizes=(count, tensors), seconds=seconds))
    return points


def _stream(count: int, returned: bool) -> float:
    return FLOOR + _traffic(12 * count) + (FRESH * 4 * count if returned and 4 * count >= 2**20 else 0.0)


def _traffic(moved: float) -> float:
    away = moved**2 / (moved**2 + CACHE**2)
    return moved * (away / FAR + (1 - away) / NEAR)


def exchanged() -> list[MeasuredExchange]:
    return [
        MeasuredExchange(kind=kind, ranks=ranks, size=size, seconds=1e-4 * ranks + size * ranks * 1e-10)
        for kind in ("all-reduce", "all-gather", "reduce-scatter", "send")
        for ranks in (2, 4)
        for size in (4096, 65536, 2**20, 2**23)
    ]


@pytest.fixture(scope="module")
def machine() -> Cluster:
    sweeps = Sweeps(
        kept=tuple(made_up()),
        returned=tuple(made_up(returned=True)),
        beside=(tuple(made_up(slower=1.25)),) * 2,
        exchanges=tuple(exchanged()),
        rest={1: 5e-4, 2: 2e-3, 4: 4e-3},
        relay={2: 5e-4, 4: 1e-4},
    )
    group = cpu_group(Host(name="two cores", cores=2, memory=8 * 2**30))
    return calibrated(Cluster(groups=(group,), network=Network(bandwidth=1e9, latency=5e-5)), sweeps)


class TestFitting:
    def test_constants_are_found_again(self, machine: Cluster) -> None:
        device = machine.groups[0].device
        found = device.measured
        wanted = {
            "floor": 7e-6,
            "operand.fp32": OPERAND,
            "convolution": 0.8,
            "convolution_half": 20.0,
            "convolution_backward": 0.8,
            "attention": 0.25,
            "attention_backward": 0.25,
            "fresh": FRESH,
            "pace.gelu": 2e-10,
            "made.gelu": 0.5,
            "update.adamw": 5e-9,
            "tensor.adamw": 4e-5,
            "update_fresh.adamw": 2e-9,
            "busy": 1.25,
            "busy_stream": 1.25,
            "all-reduce.2.start": 2e-4,
            "all-reduce.4.byte": 4e-10,
            "rest.2": 2e-3,
            "relay.2": 3e-4,  # less the send
            "relay.4": 0.0,
        }
        assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=0.03)
        assert device.peak["fp32"] == pytest.approx(PEAK, rel=0.01)
        assert device.peak["bf16"] == pytest.approx(PEAK / 2, rel=0.01)
        assert (found["near"], found["far"]) == pytest.approx((NEAR, FAR), rel=0.05)

    def test_beyond_the_cache_a_byte_takes_longer(self) -> None:
        points = [
            *exchanged(),
            MeasuredExchange(kind="send", ranks=2, size=3 * 2**23, seconds=2e-4 + 2**23 * (2e-10 + 2 * 1e-9)),
        ]
        lines = calibrate.lines(points)
        assert lines["send.2.far"] == pytest.approx(1e-9, rel=0.01)
        assert lines["send.2.byte"] == pytest.approx(2e-10, rel=0.01)
        fabric = Fabric(inside=1e9, node=1e9, per_node=2, wires=Wires(lines=lines))
        seconds = collective("send", np.array([2.0**23, 2.0**24]), np.full(2, 2.0), np.ones(2), fabric)
        assert seconds[1] - seconds[0] == pytest.approx(2**23 * 1e-9, rel=0.01)


class TestFile:
    def test_a_measured_cluster_survives_its_file(self, machine: Cluster, tmp_path: Path) -> None:
        path = tmp_path / "machine.toml"
        path.write_text(machine.to_toml())
        read = cluster(str(path))
        assert read == machine
        assert read.groups[0].device.measured == machine.groups[0].device.measured


class TestForecasts:
    def test_rates_follow_the_measurement(self, machine: Cluster) -> None:
        core = rates(machine.groups[0].device).core
        assert core is not None
        one = tuple(np.array([[float(size)]]) for size in (1, 512, 384, 384))
        seconds = core.products(one, PEAK, "fp32")
        plain = 2 * 512 * 384 * 384 / PEAK + OPERAND * (2 * 512 * 384 + 384 * 384)
        assert seconds[0, 0] == pytest.approx(7e-6 + plain, rel=0.02)

    def test_exchanges_lie_on_measured_lines(self) -> None:
        wires = Wires(lines=calibrate.lines(exchanged()))
        fabric = Fabric(inside=1e9, node=1e9, per_node=2, wires=wires)
        ranks, size = np.array([1.0, 2.0, 3.0, 4.0, 8.0]), np.full(5, 1e6)
        seconds = collective("all-reduce", size, ranks, np.ones(5), fabric)
        assert seconds == pytest.approx([0.0, 4e-4, 6e-4, 8e-4, 16e-4], rel=0.01)


class TestMeasuring:
    def test_a_quiet_machine_is_told_from_a_busy_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "stat"
        assert busy_share(path, 0.0) == 0.0  # nothing says how busy it is
        for later, share in (
            ("10 0 10 180 20 0 0 0", 0.0),  # all of 100 ticks idle or waiting for a disk
            ("45 5 20 130 20 0 0 0", 0.5),
            ("60 0 40 100 0 0 0 20", 1.0),  # what the host of a virtual machine takes is no idle time either
        ):
            path.write_text("cpu  10 0 10 100 0 0 0 0 0 0\n")
            monkeypatch.setattr(
                calibrate.time, "sleep", lambda seconds, later=later: path.write_text(f"cpu  {later} 0 0\n")
            )
            assert busy_share(path, 0.1) == pytest.approx(share)

    @pytest.mark.usefixtures("_ready_to_fork")  # what it measures are launches
    def test_the_command_writes_a_cluster(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "machine.toml"
        with pytest.raises(SystemExit) as ended:
            main(["calibrate", "--quick", "-o", str(path), "--json"])
        assert ended.value.code == 0
        assert json.loads(capsys.readouterr().out)["file"] == str(path)
        assert Core.of(cluster(str(path)).groups[0].device.measured) is not None
