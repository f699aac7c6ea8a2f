"""What hosts said, and what is wrong: tables of one fault each; which links are asked, and hosts in words."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import pytest

from phalanx.config import Plan, RunSpec
from phalanx.launch.check_hosts import (
    CheckTime,
    HostAnswer,
    HostSurvey,
    LinkAnswer,
    Needs,
    TargetHost,
    findings,
    workers_of,
)
from phalanx.launch.check_hosts.asking_links import LinkSurvey, ask_links, rounds
from phalanx.launch.check_hosts.host_findings import unshared_problems

pytestmark = pytest.mark.quick
GIB = 2**30
NAMES = ("n1", "n2", "n3")


def told(devices: int = 8) -> dict[str, Any]:
    """A host with nothing wrong."""
    return {
        "python": "3.12.1",
        "executable": "/usr/bin/python",
        "host": "n",
        "cores": 96,
        "memory": {"total": 1024 * GIB, "free": 900 * GIB},
        "limits": {"open_files": 65536, "memlock": -1, "processes": 65536},
        "shm": {"total": 64 * GIB, "free": 64 * GIB},
        "folder": {"path": "/runs", "exists": True, "shared": True, "error": "", "free": 5000 * GIB},
        "gpus": {
            "error": "",
            "driver": "550.1",
            "pids": [],
            "devices": [{"index": n, "name": "H100", "total": 80 * GIB, "used": 2**20} for n in range(devices)],
        },
        "address": "10.0.0.1",
        "interface": {"name": "eth0", "speed": 1.25e9},
        "infiniband": True,
        "meets": "",
        "free_port": 40000,
        "ending": "",
        "versions": {"torch": "2.13.0+cu126", "phalanx": "0.1.0"},
        "cuda": "12.6",
        "nccl": "2.27.3",
        "devices": [
            {"index": n, "name": "NVIDIA H100 80GB HBM3", "free": 78 * GIB, "total": 79 * GIB, "error": ""}
            for n in range(devices)
        ],
        "source": {"state": "same", "missing": False, "files": {"train.py": "a"}, "imports": {"numpy": "2.0.0"}},
        "data": {"error": "", "samples": 100, "workers": 4},
    }


def surveyed(change: Callable[[dict[str, Any]], None], *, links: tuple[LinkAnswer, ...] = ()) -> HostSurvey:
    """Three hosts, of which the second is changed."""
    hosts = {name: copy.deepcopy(told()) for name in NAMES}
    change(hosts["n2"])
    return HostSurvey(
        hosts=tuple(HostAnswer(name=name, told=one) for name, one in hosts.items()), links=links, folder=Path("/runs")
    )


def put(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(host: dict[str, Any]) -> None:
        *way, last = [int(word) if word.isdigit() else word for word in path.split(".")]
        place: Any = host
        for word in way:
            place = place[word]
        place[last] = value

    return change


def hanging_data(host: dict[str, Any]) -> None:
    host.update(loaded=True, ending="has not come to its end within 37 s")
    del host["data"]


def small_between_devices(host: dict[str, Any]) -> None:
    put("shm.free", 8 * 2**20)(host)
    put("data.workers", 0)(host)


NEEDS = Needs(plan=Plan.parse("fsdp=24"), memory=60.0 * GIB, state=100.0 * GIB)
TABLE = [
    ("nccl", put("nccl", "2.21.5"), "versions", True, "NCCL 2.21.5 on n2, 2.27.3 on n1, n3"),
    ("cuda", put("cuda", "12.4"), "versions", True, "CUDA of torch 12.4 on n2"),
    ("other driver", put("gpus.driver", "535.2"), "versions", False, "GPU driver 535.2 on n2, 550.1 on n1, n3"),
    ("driver gone", put("gpus.error", "has failed"), "devices", True, "nvidia-smi: has failed"),
    (
        "broken",
        put("devices.3.error", "CUDA error: uncorrectable ECC error"),
        "devices",
        True,
        "device 3 does not work",
    ),
    ("busy", put("gpus.devices.5.used", 30 * GIB), "devices", False, "device 5 is busy: 30.0 GiB in use"),
    ("full", put("devices.5.free", 40 * GIB), "memory", True, "device 5 has 40.0 GiB free; a worker needs 60.0 GiB"),
    ("few processes", put("limits.processes", 60), "limits", True, "its user may have 60 processes and threads"),
    ("processes", put("limits.processes", 1000), "limits", False, "its user may have 1000 processes and threads"),
    ("memlock", put("limits.memlock", 65536), "limits", False, "may lock 64.0 KiB"),
    ("few files for 24 workers", put("limits.open_files", 200), "limits", True, "may open 200 files"),
    ("files", put("limits.open_files", 300), "limits", False, "may open 300 files"),
    ("shm", put("shm.free", 8 * 2**20), "limits", True, "/dev/shm has 8.0 MiB free"),
    ("shm of devices", small_between_devices, "limits", False, "over which its devices hand on tensors"),
    ("disk", put("folder.free", 50 * GIB), "folder", True, "50.0 GiB free; a checkpoint takes 100.0 GiB"),
    ("little disk", put("folder.free", 150 * GIB), "folder", False, "150.0 GiB free"),
    ("hangs", put("ending", "has not come to its end within 40 s"), "job", True, "has not come to its end"),
    ("data hang", hanging_data, "data", True, "has not come to its end"),
    ("not its own", put("meets", "Cannot assign requested address"), "links", True, "cannot meet at 10.0.0.1: Cannot"),
    ("file", put("source.files", {"train.py": "b"}), "job", True, "train.py is not what it is on others"),
    ("own phalanx", put("versions.phalanx", "0.0.9"), "versions", True, "phalanx 0.0.9 on n2"),
    ("broken torch", put("versions.torch", "!OSError: libcudart.so.12"), "packages", True, "libcudart.so.12"),
]


def test_three_good_hosts() -> None:
    assert findings(surveyed(lambda host: None), NEEDS) == []
    assert workers_of(surveyed(lambda host: None).hosts, NEEDS) == dict.fromkeys(NAMES, 8)
    told_fewer = [replace(one, processes=2) for one in surveyed(lambda host: None).hosts]
    assert workers_of(told_fewer, NEEDS) == dict.fromkeys(NAMES, 2), "as many as the target says"


@pytest.mark.parametrize(
    ("settings", "wheres"),
    [
        ({"plan": Plan.parse("dp=2")}, []),
        ({"plan": Plan.parse("dp=1 server=1")}, ["plan.server"]),
        ({"plan": Plan.parse("dp=2"), "on_nonfinite": "rollback"}, ["run.on_nonfinite"]),
        (
            {"plan": Plan.parse("dp=2"), "mirror": "s3://b/x", "spike": 4.0, "on_spike": "rollback"},
            ["run.on_nonfinite", "run.mirror"],
        ),
    ],
)
def test_what_needs_a_shared_folder_fails_where_a_launch_refuses_it(
    settings: dict[str, Any], wheres: list[str]
) -> None:
    run = RunSpec(job="train.py", folder=Path("/runs/1"), **settings)
    said = surveyed(put("folder.shared", False))
    apart = replace(
        said.hosts[1], scratch="/tmp", told={**said.hosts[1].told, "scratch": {"error": "", "path": "/tmp"}}
    )
    found = findings(replace(said, hosts=(said.hosts[0], apart, said.hosts[2])), Needs(plan=run.plan, run=run))
    assert [one.what.partition(":")[0] for one in found if one.fails] == wheres
    assert [problem.where for problem in unshared_problems(run)] == wheres
    assert all(one.hosts == ("n2",) for one in found)


@pytest.mark.parametrize(("_", "change", "kind", "fails", "words"), TABLE, ids=[row[0] for row in TABLE])
def test_one_fault_is_one_finding(
    _: str, change: Callable[[dict[str, Any]], None], kind: str, fails: bool, words: str
) -> None:
    (finding,) = findings(surveyed(change), NEEDS)
    assert (finding.kind, finding.hosts, finding.fails) == (kind, ("n2",), fails)
    assert words in finding.what
    assert finding.fix


def test_a_host_without_torch_is_named_beside_two_with_gpus() -> None:
    def without_torch(host: dict[str, Any]) -> None:
        host["versions"]["torch"] = ""
        for name in ("cuda", "nccl", "devices"):
            del host[name]

    said = findings(surveyed(without_torch), Needs(plan=Plan.parse("fsdp=16"), memory=60.0 * GIB))
    assert [(one.kind, one.hosts) for one in said if one.fails] == [("packages", ("n2",))]
    assert "torch is not installed" in said[0].what


@pytest.mark.parametrize("text", ["fsdp=25", "dp=32 device=cuda"])
def test_more_processes_than_devices(text: str) -> None:
    (finding,) = findings(surveyed(lambda host: None), Needs(plan=Plan.parse(text)))
    assert (finding.kind, finding.fails) == ("plan", True)
    assert "there are 24" in finding.what


def links(bandwidth: Callable[[str, str], float], latency: Callable[[str, str], float]) -> tuple[LinkAnswer, ...]:
    return tuple(
        LinkAnswer(source=one, target=two, port=1, bandwidth=bandwidth(one, two), latency=latency(one, two))
        for one, two in permutations(NAMES, 2)
    )


@pytest.mark.parametrize(
    ("bandwidth", "latency", "hosts", "words"),
    [
        (lambda one, two: 1e9, lambda one, two: 1e-4, None, ""),
        (lambda one, two: 1e8 if "n3" in (one, two) else 1e9, lambda *_: 1e-4, ("n3",), "all its links carry"),
        (lambda one, two: 1e8 if one == "n3" else 1e9, lambda *_: 1e-4, ("n3",), "it sends"),
        (lambda one, two: 1e8 if two == "n3" else 1e9, lambda *_: 1e-4, ("n3",), "it gets"),
        (lambda *way: 1e8 if way == ("n1", "n2") else 1e9, lambda *_: 1e-4, ("n1", "n2"), "go from n1 to n2"),
    ],
)
def test_slow_links_are_named(bandwidth: Any, latency: Any, hosts: tuple[str, ...] | None, words: str) -> None:
    said = findings(surveyed(lambda host: None, links=links(bandwidth, latency)), None)
    assert [one.hosts for one in said] == ([hosts] if hosts else [])
    assert all(words in one.what for one in said)
    assert not any(one.fails for one in said)


@pytest.mark.parametrize("count", range(1, 20))
def test_rounds_ask_every_pair_and_no_host_twice_at_once(count: int) -> None:
    asked = rounds(count)
    for pairs in asked:
        names = [name for pair in pairs for name in pair]
        assert len(names) == len(set(names))
    pairs = sorted(tuple(sorted(pair)) for one in asked for pair in one)
    every = sorted(combinations(range(count), 2))
    ring = sorted({tuple(sorted((one, (one + 1) % count))) for one in range(count)})
    assert pairs == (every if count <= 8 else ring)


@pytest.mark.parametrize("off", [3600.0, -3600.0])
def test_the_clock_that_is_off_is_that_of_few(off: float) -> None:
    """Also where it is the asker's: then all hosts are right, and none is named."""

    def ahead(*offsets: float) -> list[tuple[str, ...]]:
        hosts = [HostAnswer(name=n, told=told(), ahead=(o - 1, o + 1)) for n, o in zip(NAMES, offsets, strict=True)]
        return [one.hosts for one in findings(HostSurvey(hosts=tuple(hosts), links=(), folder=Path("/runs")), None)]

    assert ahead(0.0, off, 0.0) == [("n2",)]
    assert ahead(off, off, off) == []


@pytest.mark.parametrize(
    ("said", "way"),
    [
        ("Host key verification failed.", "ssh n2, once by hand"),
        ("ssh: Could not resolve hostname n2: Name or service not known", "an entry n2 in ~/.ssh/config"),
        ("connect to host n2 port 22: Connection refused", "sshd listens there"),
        ("me@n2: Permission denied (publickey).", "ssh-copy-id n2"),
        ("sh: 1: /opt/nope/bin/python: not found", "python = "),
        ("exec: /opt/nope/bin/python: No such file or directory", "python = "),
        ("without a word", "ssh n2 true"),
    ],
)
def test_what_to_do_about_a_host_goes_by_why_it_is_not_reached(said: str, way: str) -> None:
    hosts = (HostAnswer(name="n1", told=told()), HostAnswer(name="n2", told={}, error=said))
    (finding,) = [
        one for one in findings(HostSurvey(hosts=hosts, links=(), folder=Path("/runs")), None) if one.kind == "host"
    ]
    assert finding.what == said
    assert way in finding.fix


pytestmark = pytest.mark.quick


class Named(TargetHost):
    def __init__(self, number: int) -> None:
        self.name = f"n{number}"

    def run(self, arguments: Sequence[str], text: str, patience: float) -> str:
        raise NotImplementedError


def asked(count: int) -> LinkSurvey:
    """What so many hosts say of their links where there is no time."""
    hosts = [Named(number) for number in range(count)]
    told = {one.name: {"address": f"at {one.name}", "free_port": 1000} for one in hosts}

    def ask(host: TargetHost, question: dict[str, Any]) -> dict[str, Any]:
        if "comers" in question:
            return {}
        return {"error": "", "latency": 1e-4, **({} if "comes" in question else {"bandwidth": 1e9})}

    with ThreadPoolExecutor(count) as pool:
        return ask_links(hosts, told, ask, pool, CheckTime(0.0))


@pytest.mark.parametrize(("count", "pairs", "unasked"), [(2, 1, 0), (5, 4, 6), (8, 8, 20), (11, 10, 9), (12, 12, 9)])
def test_without_time_there_are_two_rounds_and_other_pairs_are_counted(count: int, pairs: int, unasked: int) -> None:
    said = asked(count)
    assert (len(said.links), said.unasked) == (2 * pairs, unasked)
