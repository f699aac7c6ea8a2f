"""Constants of this machine: found again from sweeps made up by their laws, written, read, and used by forecasts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from phalanx.cli.app import main
from phalanx.config import Cluster, Host, Network
from phalanx.device_kinds import host
from phalanx.forecast.network import Fabric, collective
from phalanx.forecast.rates import Core, Wires, rates
from phalanx.forecast.step_time import StepTime, crowded
from phalanx.hardware import calibrate, cluster
from phalanx.hardware.calibrate import Sweeps, busy_share, calibrated
from phalanx.hardware.probe import cpu_group
from phalanx.hardware.sweeps import MeasuredExchange, Measurement
from phalanx.launch import measure_gpu
from phalanx.launch.measure_gpu import QUICK as QUICK_GPU
from phalanx.launch.measure_gpu import with_measured_kernels

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
        seconds = core.products(one, PEAK, "fp32")  # pyright: ignore[reportArgumentType]
        plain = 2 * 512 * 384 * 384 / PEAK + OPERAND * (2 * 512 * 384 + 384 * 384)
        assert seconds[0, 0] == pytest.approx(7e-6 + plain, rel=0.02)

    def test_exchanges_lie_on_measured_lines(self) -> None:
        wires = Wires(lines=calibrate.lines(exchanged()))
        fabric = Fabric(inside=1e9, node=1e9, per_node=2, wires=wires)
        ranks, size = np.array([1.0, 2.0, 3.0, 4.0, 8.0]), np.full(5, 1e6)
        seconds = collective("all-reduce", size, ranks, np.ones(5), fabric)
        assert seconds == pytest.approx([0.0, 4e-4, 6e-4, 8e-4, 16e-4], rel=0.01)

    def test_processes_beyond_the_cores_take_turns(self) -> None:
        core = Core(floor=1e-6, operand={"fp32": 0.0}, near=1e10, far=1e10, cache=1e6, busy=1.2, busy_stream=1.5)
        processes = np.array([1.0, 2.0, 4.0])
        step = crowded(_step(products=1.0, memory=0.5, pipeline=0.0), processes, 2, core)
        assert step.products == pytest.approx([1.0, 1.2, 2.4])
        assert step.memory == pytest.approx([0.5, 0.75, 1.5])

    def test_turns_fill_what_a_pipeline_waits(self) -> None:
        core = Core(floor=1e-6, operand={"fp32": 0.0}, near=1e10, far=1e10, cache=1e6)
        step = crowded(_step(products=1.0, memory=0.0, pipeline=0.75), np.array([4.0, 4.0, 4.0]), 2, core)
        assert step.total == pytest.approx([2.0, 2.0, 2.0])
        longer = crowded(_step(products=1.0, memory=0.0, pipeline=3.0), np.array([4.0, 4.0, 4.0]), 2, core)
        assert longer.total == pytest.approx([4.0, 4.0, 4.0])


def _step(*, products: float, memory: float, pipeline: float) -> StepTime:
    none, known = np.zeros(3), {"products": products, "memory": memory, "pipeline": pipeline}
    names = StepTime.__slots__
    return StepTime(**{name: np.full(3, known[name]) if name in known else none for name in names})


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

    def test_waiting_ends_when_it_is_quiet_or_patience_is_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        looks = iter((0.9, 0.5, 0.1, 0.0))
        monkeypatch.setattr(calibrate, "busy_share", lambda: next(looks))
        assert calibrate.wait_until_quiet(60.0) == 0.1
        monkeypatch.setattr(calibrate, "busy_share", lambda: 0.9)
        assert calibrate.wait_until_quiet(0.0) == 0.9

    @pytest.mark.usefixtures("_ready_to_fork")  # what it measures are launches
    def test_the_command_writes_a_cluster(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "machine.toml"
        with pytest.raises(SystemExit) as ended:
            main(["calibrate", "--quick", "-o", str(path), "--json"])
        assert ended.value.code == 0
        assert json.loads(capsys.readouterr().out)["file"] == str(path)
        assert Core.of(cluster(str(path)).groups[0].device.measured) is not None


def test_kernels_of_a_gpu_are_what_forecasts_read(tmp_path: Path) -> None:
    kind = host()  # in place of a GPU: the arithmetic and the file are the same
    found = with_measured_kernels(cluster("2xH100"), kind, QUICK_GPU)
    (tmp_path / "machine.toml").write_text(found.to_toml())
    device = cluster(str(tmp_path / "machine.toml")).groups[0].device
    assert set(device.measured) == {"product", "stream", "attention", "attention_backward", "host"}
    known, read = rates(cluster("2xH100").groups[0].device), rates(device)
    assert {name: getattr(read.kernels, name) for name in device.measured} == dict(device.measured)
    assert read.kernels.floor == known.kernels.floor  # not measured
    assert all(0 < value <= 1 for value in device.measured.values())


def test_shares_are_of_the_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_gpu._Timer, "_seconds", lambda self, work, count=10: (work(), 1e-3)[1])
    device = with_measured_kernels(cluster("1xH100"), host(), QUICK_GPU).groups[0].device
    flops, moved = 2 * QUICK_GPU.product**3 / 1e-3, 12 * QUICK_GPU.stream / 1e-3
    depth = rates(cluster("1xH100").groups[0].device).kernels.depth
    assert device.measured["product"] == pytest.approx(flops / device.peak["bf16"] * (1 + depth / QUICK_GPU.product))
    assert device.measured["stream"] == pytest.approx(moved / device.bandwidth)
    assert device.measured["attention"] == pytest.approx(
        64 * 2 * QUICK_GPU.tokens**2 * 128 / 1e-3 / device.peak["bf16"]
    )
