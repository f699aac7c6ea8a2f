"""What hosts said, or a target says of them → the cluster that plans and forecasts are for: tables of answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.comm.mesh import Mesh
from phalanx.config import Cluster, Plan
from phalanx.errors import SpecError
from phalanx.hardware import entry
from phalanx.launch.check import DeviceFacts, HostAnswer, HostFacts, HostSurvey, LinkAnswer
from phalanx.launch.check_findings import HostFinding, Needs, findings
from phalanx.launch.targets.offer import nearest_plan
from phalanx.preflight.target_cluster import cluster_there

pytestmark = pytest.mark.quick
GIB = 2**30
H100, A100 = ("NVIDIA H100 80GB HBM3", 79 * GIB), ("NVIDIA A100-SXM4-40GB", 39 * GIB)


def host(
    name: str,
    processes: int = 0,
    *,
    has: tuple[tuple[str, int], ...] = (),
    cores: int = 8,
    memory: int = 64 * GIB,
    speed: float = 0.0,
) -> HostAnswer:
    facts = HostFacts(
        python="3.12.1",
        clock=1.0,
        address="10.0.0.1",
        shared=True,
        speed=speed,
        cores=cores,
        memory=memory,
        memory_free=memory,
        folder_free=2**40,
        versions={"torch": "2.13.0", "phalanx": "0.1.0"},
        devices=tuple(
            DeviceFacts(index=index, name=kind, free=size, total=size) for index, (kind, size) in enumerate(has)
        ),
    )
    return HostAnswer(name=name, processes=processes, facts=facts)


def link(source: str, target: str, bandwidth: float, latency: float = 1e-4, error: str = "") -> LinkAnswer:
    return LinkAnswer(source=source, target=target, bandwidth=bandwidth, latency=latency, error=error)


def there(*hosts: HostAnswer, links: tuple[LinkAnswer, ...] = ()) -> Cluster:
    return cluster_there(HostSurvey(hosts=hosts, links=links, folder=Path("/runs")))


def both(bandwidth: float, latency: float = 1e-4) -> tuple[LinkAnswer, ...]:
    return (link("n0", "n1", bandwidth, latency), link("n1", "n0", bandwidth, latency))


class TestHosts:
    def test_alike_ones_are_a_group_with_the_devices_of_the_catalog(self) -> None:
        found = there(host("n0", 8, has=(H100,) * 8), host("n1", 8, has=(H100,) * 8))
        (group,) = found.groups
        assert (group.nodes, group.per_node, group.device.name) == (2, 8, "H100")
        assert group.link == entry("H100").link
        assert group.device.room < 79 * GIB
        assert found.network == entry("H100").network(8)
        assert str(found) == "2x8xH100"

    def test_workers_share_the_cores_and_memory_of_their_host(self) -> None:
        found = there(host("n0", 2), host("n1", 2, memory=63 * GIB))
        (group,) = found.groups
        core = entry("cpu").device
        assert (group.nodes, group.per_node, group.device.kind) == (2, 2, "cpu")
        assert group.device.peak["fp32"] == 4 * core.peak["fp32"]
        assert group.device.memory == 63 * GIB // 2
        assert group.host.name == "n0, n1"

    def test_hosts_with_and_without_devices_are_refused(self) -> None:
        with pytest.raises(SpecError, match="n1, without a GPU for each worker"):
            there(host("n0", 2, has=(H100,) * 2), host("n1", 2, has=(H100,)))


class TestNetwork:
    def test_is_the_slowest_link_and_half_the_usual_trip(self) -> None:
        hosts = [host(name, 1) for name in ("n0", "n1", "n2")]
        links = (link("n0", "n1", 1.234567e8, 2e-4), link("n1", "n2", 5e7, 4e-4), link("n2", "n0", 1e8, 2e-4))
        found = there(*hosts, links=links).network
        assert (found.bandwidth, found.latency, found.name) == (5e7, 1e-4, "")

    def test_is_the_catalogs_where_none_was_measured(self) -> None:
        broken = tuple(link("n0", "n1", 0.0, error="refused") for _ in range(2))
        assert there(host("n0", 1), host("n1", 1), links=broken).network == entry("cpu").network(1)

    def test_one_connection_is_not_taken_for_a_fast_interface(self) -> None:
        fast = [host(name, 1, speed=12.5e9) for name in ("n0", "n1")]
        assert there(*fast, links=both(1.1e9)).network.bandwidth == 12.5e9
        assert there(*fast, links=both(1e8)).network.bandwidth == 1e8


@pytest.mark.parametrize(
    ("plan", "processes", "nearest"),
    [
        ("dp=2", 4, "dp=4"),
        ("dp=2 tp=4", 16, "dp=4 tp=4"),
        ("fsdp=8 zero=3", 4, "fsdp=4 zero=3"),
        ("pp=2 tp=4 micro=2", 4, "dp=4"),
        ("dp=8 server=1", 5, "dp=4 server=1"),
        ("tp=4", 3, "dp=3"),
        ("tp=8 pp=3", 7, "dp=7"),
    ],
)
def test_the_nearest_plan(plan: str, processes: int, nearest: str) -> None:
    assert nearest_plan(Plan.parse(plan), processes) == Plan.parse(nearest)


@pytest.mark.parametrize(
    ("devices", "plan", "names"),
    [
        ((2, 1), "dp=4", ["n1"]),
        ((2, 0), "dp=4", ["n1"]),
        ((2, 0), "dp=4 device=cpu", []),
        ((0, 0), "dp=4", []),
        ((2, 2), "dp=4", []),
    ],
)
def test_a_host_with_fewer_devices_than_workers_is_named(devices: tuple[int, ...], plan: str, names: list[str]) -> None:
    found = [one for one in checked(Plan.parse(plan), (2, 2), devices) if "workers, which need" in one.what]
    assert [name for one in found for name in one.hosts] == names
    assert all(one.fails for one in found)


class TestRanks:
    @pytest.mark.parametrize(
        ("plan", "devices"), [("dp=2 tp=2", (2, 2)), ("pp=2 tp=2", (2, 2)), ("dp=3 tp=2", (4, 2)), ("tp=2", (1, 1))]
    )
    def test_a_tp_group_is_on_one_host_or_it_is_said(self, plan: str, devices: tuple[int, ...]) -> None:
        asked = Plan.parse(plan)
        host_of = [number for number, count in enumerate(devices) for _ in range(count)]
        groups = [{host_of[peer] for peer in Mesh(asked, rank).peers("tp")} for rank in range(asked.world_size)]
        inside = all(len(group) == 1 for group in groups)
        assert inside == (devices != (1, 1))
        assert bool(split_groups(asked, devices)) != inside


def split_groups(plan: Plan, workers: tuple[int, ...]) -> list[HostFinding]:
    return [one for one in checked(plan, workers) if "tp groups" in one.what]


def checked(plan: Plan, workers: tuple[int, ...], devices: tuple[int, ...] = ()) -> list[HostFinding]:
    """What is found on hosts with nothing wrong but how many ``workers`` and ``devices`` each has."""
    hosts = [
        host(f"n{number}", count, has=(H100,) * have)
        for number, (count, have) in enumerate(zip(workers, devices or [0] * len(workers), strict=True))
    ]
    return findings(HostSurvey(hosts=tuple(hosts), folder=Path("/runs")), Needs(plan=plan))
