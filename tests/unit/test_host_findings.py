"""What hosts said, and what is wrong: tables of one fault each; links, clocks and hosts without an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.config import Plan
from phalanx.launch.check import DeviceFacts, HostAnswer, HostFacts, HostSurvey, LinkAnswer
from phalanx.launch.check_findings import Needs, findings, workers_of

pytestmark = pytest.mark.quick
GIB = 2**30
NAMES = ("n1", "n2", "n3")


def good(devices: int = 8) -> HostFacts:
    """A host without faults."""
    return HostFacts(
        python="3.12.1",
        cores=96,
        memory=1024 * GIB,
        memory_free=900 * GIB,
        open_files=65536,
        locked_memory=-1,
        processes=65536,
        shm_free=64 * GIB,
        shared=True,
        folder_free=5000 * GIB,
        driver="550.1",
        driver_devices=devices,
        address="10.0.0.1",
        speed=1.25e9,
        infiniband=True,
        free_port=40000,
        clock=1.0,
        versions={"torch": "2.13.0+cu126", "phalanx": "0.1.0", "cuda": "12.6", "nccl": "2.27.3", "numpy": "2.0.0"},
        devices=tuple(
            DeviceFacts(index=n, name="NVIDIA H100 80GB HBM3", free=79 * GIB, total=79 * GIB) for n in range(devices)
        ),
        files={"train.py": "a"},
        data_read=True,
        samples=100,
        loaders=4,
    )


def surveyed(change: Callable[[HostFacts], HostFacts], *, links: tuple[LinkAnswer, ...] = ()) -> HostSurvey:
    """Three hosts, of which the second is changed."""
    hosts = {name: good() for name in NAMES}
    hosts["n2"] = change(hosts["n2"])
    answers = tuple(HostAnswer(name=name, facts=one) for name, one in hosts.items())
    return HostSurvey(hosts=answers, links=links, folder=Path("/runs"), files={"train.py": "a"})


def put(**facts: Any) -> Callable[[HostFacts], HostFacts]:
    return lambda host: replace(host, **facts)


def version(**other: str) -> Callable[[HostFacts], HostFacts]:
    return lambda host: replace(host, versions={**host.versions, **other})


def device(number: int, **facts: Any) -> Callable[[HostFacts], HostFacts]:
    def change(host: HostFacts) -> HostFacts:
        before, one, after = host.devices[:number], host.devices[number], host.devices[number + 1 :]
        return replace(host, devices=(*before, replace(one, **facts), *after))

    return change


NEEDS = Needs(plan=Plan.parse("fsdp=24"), memory=40.0 * GIB, state=100.0 * GIB)
TABLE = [
    ("nccl", version(nccl="2.21.5"), "versions", True, "NCCL 2.21.5 on n2, 2.27.3 on n1, n3"),
    ("cuda", version(cuda="12.4"), "versions", True, "CUDA of torch 12.4 on n2"),
    ("import", version(numpy="1.9"), "versions", False, "numpy 1.9 on n2, 2.0.0 on n1, n3"),
    ("own phalanx", version(phalanx="0.0.9"), "versions", True, "phalanx 0.0.9 on n2"),
    ("other driver", put(driver="535.2"), "versions", False, "GPU driver 535.2 on n2, 550.1 on n1, n3"),
    ("driver gone", put(driver_error="has failed"), "devices", True, "nvidia-smi: has failed"),
    ("broken", device(3, error="uncorrectable ECC error"), "devices", True, "device 3 does not work: uncorrectable"),
    ("busy", device(5, free=49 * GIB), "devices", False, "device 5 is busy: 30.0 GiB in use"),
    ("few processes", put(processes=60), "limits", True, "its user may have 60 processes and threads"),
    ("processes", put(processes=1000), "limits", False, "its user may have 1000 processes and threads"),
    ("memlock", put(locked_memory=65536), "limits", False, "may lock 64.0 KiB"),
    ("few files for 24 workers", put(open_files=200), "limits", True, "may open 200 files"),
    ("files", put(open_files=300), "limits", False, "may open 300 files"),
    ("shm", put(shm_free=8 * 2**20), "limits", True, "/dev/shm has 8.0 MiB free"),
    ("shm of devices", put(shm_free=8 * 2**20, loaders=0), "limits", False, "for the tensors of its devices"),
    ("disk", put(folder_free=50 * GIB), "folder", True, "50.0 GiB free; a checkpoint takes 100.0 GiB"),
    ("little disk", put(folder_free=150 * GIB), "folder", False, "150.0 GiB free"),
    ("read-only", put(folder_error="Read-only file system"), "folder", True, "/runs cannot be written to: Read-only"),
    ("no folder for workers", put(no_cwd=True), "folder", True, "the folder in which workers work is not there"),
    ("apart", put(shared=False), "folder", True, "/runs is not the folder of that path here"),
    ("hangs", put(ending="has not come to its end within 40 s"), "job", True, "has not come to its end"),
    ("data hang", put(ending="has not come to its end within 37 s", step="data"), "data", True, "has not come to"),
    ("job", put(job_error="train.py: ValueError", job_fix="mend it"), "job", True, "train.py: ValueError"),
    ("data", put(data_error="holds no sample"), "data", True, "the job's data: holds no sample"),
    ("not its own", put(meets="Cannot assign requested address"), "links", True, "cannot meet at 10.0.0.1: Cannot"),
    ("file", put(files={"train.py": "b"}), "job", True, "train.py is another file: b on n2, a on this machine, n1, n3"),
]


def test_a_full_device_is_named() -> None:
    said = findings(surveyed(device(5, free=30 * GIB)), NEEDS)
    assert [(one.kind, one.hosts) for one in said if one.fails] == [("memory", ("n2",))]
    assert said[0].what == "30.0 GiB free on device 5; a worker needs 40.0 GiB"


def test_words_of_a_host_stay_on_one_line() -> None:
    (finding,) = findings(surveyed(put(data_error="gone\nfails  n1: all is lost")), NEEDS)
    assert "\n" not in finding.what


def test_three_good_hosts() -> None:
    assert findings(surveyed(put()), NEEDS) == []
    assert workers_of(surveyed(put()).hosts, NEEDS.plan) == dict.fromkeys(NAMES, 8)
    told_fewer = [replace(one, processes=2) for one in surveyed(put()).hosts]
    assert workers_of(told_fewer, NEEDS.plan) == dict.fromkeys(NAMES, 2), "as many as the target says"


@pytest.mark.parametrize(("_", "change", "kind", "fails", "words"), TABLE, ids=[row[0] for row in TABLE])
def test_one_fault_is_one_finding(
    _: str, change: Callable[[HostFacts], HostFacts], kind: str, fails: bool, words: str
) -> None:
    (finding,) = findings(surveyed(change), NEEDS)
    assert (finding.kind, finding.hosts, finding.fails) == (kind, ("n2",), fails)
    assert words in finding.what
    assert finding.fix


@pytest.mark.parametrize("text", ["fsdp=25", "dp=32 device=cuda"])
def test_more_processes_than_devices(text: str) -> None:
    (finding,) = findings(surveyed(put()), Needs(plan=Plan.parse(text)))
    assert (finding.kind, finding.fails) == ("plan", True)
    assert "there are 24" in finding.what


def ring(*bandwidths: float) -> tuple[LinkAnswer, ...]:
    ends = zip(NAMES, (*NAMES[1:], NAMES[0]), bandwidths, strict=True)
    return tuple(LinkAnswer(source=one, target=two, met=True, bandwidth=rate, latency=1e-4) for one, two, rate in ends)


def test_a_slow_link_is_named_with_its_ends() -> None:
    assert findings(surveyed(put(), links=ring(1e9, 1e9, 9e8))) == []
    (finding,) = findings(surveyed(put(), links=ring(1e9, 1e8, 1e9)))
    assert (finding.hosts, finding.fails) == (("n2", "n3"), False)
    assert finding.what == "the link from n2 to n3 carries 95.4 MiB/s; most links 953.7 MiB/s"


FAILED = "The client socket has timed out"


@pytest.mark.parametrize(
    ("errors", "met", "hosts", "words"),
    [
        (
            {"n1": "waits", "n2": FAILED, "n3": "waits"},
            "n1 n3",
            ("n2",),
            "it does not reach n1, where all workers meet",
        ),
        ({"n1": "waits", "n2": FAILED, "n3": FAILED}, "n1", ("n1",), "no other host reaches n1, where all workers"),
        (dict.fromkeys(NAMES, "refused by 10.0.0.3"), "n1 n2 n3", ("n3",), "hosts do not reach each other: refused"),
        (dict.fromkeys(NAMES, "timed out"), "n1 n2 n3", NAMES, "hosts do not reach each other: timed out"),
    ],
)
def test_hosts_that_are_not_reached_are_named(
    errors: dict[str, str], met: str, hosts: tuple[str, ...], words: str
) -> None:
    broken = tuple(LinkAnswer(target=name, met=name in met, error=error) for name, error in errors.items())
    said = surveyed(put(), links=broken)
    facts = [replace(good(), address=f"10.0.0.{number + 1}") for number in range(3)]
    answers = tuple(replace(one, facts=here) for one, here in zip(said.hosts, facts, strict=True))
    (finding,) = findings(replace(said, hosts=answers))
    assert (finding.kind, finding.hosts, finding.fails) == ("links", hosts, True)
    assert words in finding.what


@pytest.mark.parametrize("off", [3600.0, -3600.0])
def test_the_clock_that_is_off_is_that_of_few(off: float) -> None:
    """Also where it is the asker's: then all hosts are right, and none is named."""

    def ahead(*offsets: float) -> list[tuple[str, ...]]:
        hosts = [HostAnswer(name=n, facts=good(), ahead=o) for n, o in zip(NAMES, offsets, strict=True)]
        return [one.hosts for one in findings(HostSurvey(hosts=tuple(hosts), folder=Path("/runs")))]

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
        ("ModuleNotFoundError: No module named 'torch'", "install the same Phalanx and torch"),
        ("OSError: libcudart.so.12: cannot open shared object file", "install the same Phalanx and torch"),
        ("without a word", "ssh n2 true"),
    ],
)
def test_what_to_do_about_a_host_goes_by_why_it_is_not_reached(said: str, way: str) -> None:
    hosts = (HostAnswer(name="n1", facts=good()), HostAnswer(name="n2", error=said))
    (finding,) = findings(HostSurvey(hosts=hosts, folder=Path("/runs")))
    assert finding.what == said
    assert way in finding.fix
