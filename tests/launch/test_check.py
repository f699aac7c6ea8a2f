"""``phalanx check`` against hosts with one thing wrong each: it names that, on that host, and nothing else."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from launched import Queue, StandIn, StandIns

from emulator.network import HostLink, HostNetwork, lacking, tool
from law_rows import longer
from phalanx.cli import main
from phalanx.launch.check import TargetHost
from phalanx.launch.targets.find_target import TARGETS

JOB = """
import beside
import numpy
import torch

import phalanx as px


def job() -> px.Job:
    return px.Job(
        model=lambda: torch.nn.Linear(4, 2),
        data=beside.data,
        loss=lambda output, batch: px.cross_entropy(output, batch[1]),
        inputs=lambda batch: batch[0],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=8,
        steps=2,
        workers={workers},
    )
"""
BESIDE = """
import os

import torch


def data():
    if path := os.environ.get("DATA_AT"):
        open(path).close()
    return torch.utils.data.TensorDataset(torch.ones(16, 4), torch.zeros(16, dtype=torch.long))
"""


Check = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "beside.py").write_text(BESIDE)
    (folder / "train.py").write_text(JOB.format(workers=0))
    (folder / "runs").mkdir()
    return folder / "train.py"


@pytest.fixture
def looked(job: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Check]:
    """Runs ``phalanx check`` over hosts; the exit code and the answer."""
    monkeypatch.setitem(TARGETS, "stand-ins", "launched:StandIns")
    monkeypatch.setitem(TARGETS, "queue", "launched:Queue")
    monkeypatch.setattr(StandIns, "made", [])

    def run(*hosts: TargetHost, options: str = "--plan dp=2", run: str = "runs") -> tuple[int, dict[str, Any]]:
        StandIns.made[:] = hosts
        to = ["--to", "stand-ins:"] if hosts else []
        words = [str(job), *to, *shlex.split(options), "--run", str(job.parent / run), "--json"]
        result = CliRunner().invoke(main, ["check", *words])
        assert result.exit_code in (0, 1), result.output
        answer = json.loads(result.stdout)
        assert result.exit_code == int(answer["would_fail"])
        assert not list(job.parent.rglob(".phalanx-check-*"))
        return result.exit_code, answer

    yield run
    for name in ("train", "beside"):
        sys.modules.pop(name, None)


@pytest.fixture
def check(looked: Check) -> Check:
    """The same, for tests that ``make engines`` runs but for the first."""
    return looked


def stub(folder: Path, name: str, version: str) -> str:
    """A folder to put first on PYTHONPATH, in which a package is the real one but for its version."""
    package = folder / f"other-{name}" / name
    package.mkdir(parents=True)
    text = f"""
import importlib, os, sys
here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
at = sys.path.index(here)
del sys.path[at], sys.modules[__name__]
importlib.import_module(__name__).__version__ = {version!r}
sys.path.insert(at, here)
"""
    (package / "__init__.py").write_text(text)
    return str(package.parent)


def at_start(folder: Path, text: str) -> str:
    """A folder to put first on PYTHONPATH, so that Python begins with ``text``."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(text)
    return str(folder)


def first(folder: str) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])}


def found(answer: dict[str, Any], *, slow: bool = False) -> list[tuple[str, tuple[str, ...], bool]]:
    """Kind, hosts, whether training fails; links that are slower than others only where they are made so."""
    said = [one for one in answer["findings"] if slow or one["kind"] != "links" or one["fails"]]
    return [(one["kind"], tuple(one["hosts"]), one["fails"]) for one in said]


def test_this_machine_is_checked_where_no_target_is_named(check: Check) -> None:
    code, answer = check()
    assert (code, answer["findings"]) == (0, [])
    assert [host["name"] for host in answer["hosts"]] == ["this machine"]


class TestPackages:
    def test_another_torch_and_a_host_that_is_not_reached(self, looked: Check, tmp_path: Path) -> None:
        old = StandIn("n2", **first(stub(tmp_path, "torch", "2.11.0")))
        hosts = StandIn("n1"), old, StandIn("n3"), StandIn("n4", before=["false"])
        code, answer = looked(*hosts, StandIn("n5", before=["echo", "phalanx-check:{"]))
        wrong = {("versions", ("n2",), True), ("host", ("n4",), True), ("packages", ("n5",), True)}
        assert (code, {*found(answer)}) == (1, wrong)
        (what,) = [one["what"] for one in answer["findings"] if one["kind"] == "versions"]
        assert "torch 2.11.0 on n2" in what
        assert "on n1, n3" in what
        reached = {f"n{number}" for number in range(1, 4)}
        assert {one for link in answer["links"] for one in (link["source"], link["target"])} == reached

    @pytest.mark.parametrize("name", ["torch", *longer("phalanx")])
    def test_a_missing_module(self, check: Check, tmp_path: Path, name: str) -> None:
        text = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {name!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
"""
        code, answer = check(StandIn("n1"), StandIn("n2", **first(at_start(tmp_path / "start", text))))
        assert (code, found(answer)) == (1, [("packages", ("n2",), True)])
        assert f"No module named '{name}'" in answer["findings"][0]["what"]
        assert answer["findings"][0]["fix"].startswith("install the same Phalanx and torch there")


class TestJob:
    def test_a_job_that_ends_its_process(self, check: Check, job: Path) -> None:
        (job.parent / "beside.py").write_text(
            BESIDE + "\nimport os\nif 'DIES' in os.environ: os.kill(os.getpid(), 9)\n"
        )
        code, answer = check(StandIn("n1"), StandIn("n2", DIES="1"))
        assert (code, found(answer)) == (1, [("job", ("n2",), True)])
        assert "ended by signal 9" in answer["findings"][0]["what"]


def mounted(words: str) -> list[str]:
    """What stands before a command that is to have mounts of its own; skips the test where there can be none."""
    tried = subprocess.run(["unshare", "-m", "sh", "-c", words], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip(f"nothing can be mounted here: {tried.stderr.decode().strip()}")
    return ["unshare", "-m", "sh", "-c", f'{words} && exec "$@"', "sh"]


class TestFolder:
    def test_that_is_not_shared(self, looked: Check, job: Path) -> None:
        alone = mounted(f"mount -t tmpfs none {job.parent / 'runs'}")
        code, answer = looked(StandIn("n2", before=alone), options="--plan dp=1")
        assert (code, found(answer)) == (1, [("folder", ("n2",), True)])
        assert "is not the folder of that path here" in answer["findings"][0]["what"]


class TestLimits:
    def test_little_shared_memory(self, check: Check, job: Path) -> None:
        small = StandIn("n2", before=mounted("mount -t tmpfs -o size=1m none /dev/shm"))
        assert check(StandIn("n1"), small)[0] == 0  # nobody needs it
        job.write_text(JOB.format(workers=2))
        code, answer = check(StandIn("n1"), small)
        assert (code, found(answer)) == (1, [("limits", ("n2",), True)])


class TestPlan:
    def test_too_little_memory(self, check: Check, tmp_path: Path) -> None:
        fake = tmp_path / "meminfo"
        fake.write_text("MemTotal: 400000 kB\nMemFree: 20000 kB\nMemAvailable: 30000 kB\n")
        small = StandIn("n2", before=mounted(f"mount --bind {fake} /proc/meminfo"))
        code, answer = check(StandIn("n1"), small)
        assert (code, found(answer)) == (1, [("memory", ("n2",), True)])


def test_a_clock_an_hour_off(check: Check, tmp_path: Path) -> None:
    text = "import time\nright = time.time\ntime.time = lambda: right() + 3600\n"
    off = StandIn("n2", **first(at_start(tmp_path / "start", text)))
    code, answer = check(StandIn("n1"), off, StandIn("n3"))
    assert (code, found(answer)) == (0, [("clock", ("n2",), False)])


class Wired:
    """Three hosts with a network stack each, whose links carry 400 Mbit/s."""

    def __init__(self) -> None:
        self.network = HostNetwork(3, HostLink(rate=4e8))
        self.hosts = [
            StandIn(f"n{number + 1}", before=self._within(number), address=self.network.address(number))
            for number in range(3)
        ]

    def do(self, number: int, words: str) -> None:
        program, *rest = words.split()
        subprocess.run([*self._within(number), str(tool(program)), *rest], check=True, capture_output=True)

    def _within(self, number: int) -> list[str]:
        return [str(tool("nsenter")), f"--net={self.network.namespace(number)}", "--"]


@pytest.fixture
def wired() -> Iterator[Wired]:
    if why := lacking(HostLink(rate=4e8)):
        pytest.skip(why)
    made = Wired()
    yield made
    made.network.close()


@pytest.mark.realtime("links are measured")
class TestLinks:
    def test_good_ones_raise_no_alarm(self, check: Check, wired: Wired) -> None:
        code, answer = check(*wired.hosts)
        assert (code, answer["findings"]) == (0, [])
        assert all(host["facts"]["samples"] == 16 for host in answer["hosts"])
        assert len(answer["links"]) == 3
        assert all(link["latency"] > 0 for link in answer["links"])
        assert all(1e7 < link["bandwidth"] < 6e7 for link in answer["links"])

    def test_a_host_that_is_cut_off_from_the_others(self, check: Check, wired: Wired) -> None:
        wired.network.cut(1)
        code, answer = check(*wired.hosts)
        assert (code, found(answer)) == (1, [("links", ("n2",), True)])
        assert "it does not reach n1, where all workers meet" in answer["findings"][0]["what"]

    def test_a_link_at_a_tenth_of_the_others(self, check: Check, wired: Wired) -> None:
        wired.do(2, "tc qdisc del dev net0 root")
        wired.do(2, "tc qdisc add dev net0 root tbf rate 40mbit burst 130k limit 400k")
        code, answer = check(*wired.hosts)
        assert (code, found(answer, slow=True)) == (0, [("links", ("n3", "n1"), False)])
        assert answer["findings"][0]["what"].startswith("the link from n3 to n1 carries ")


def test_an_address_to_meet_at_that_is_not_the_hosts_own(check: Check) -> None:
    code, answer = check(StandIn("n1", address="198.51.100.7"), options="--plan dp=1")
    assert (code, found(answer)) == (1, [("links", ("n1",), True)])
    assert "workers cannot meet at 198.51.100.7: " in answer["findings"][0]["what"]


class TestQueue:
    def test_is_asked_and_what_is_not_known_is_said(self, looked: Check, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Queue, "words", "no such partition")
        monkeypatch.setattr(Queue, "asked", [])
        code, answer = looked(options="--plan dp=8 --to queue --nodes 8")
        assert (code, found(answer)) == (1, [("queue", (), True)])
        assert answer["not_looked_at"] == ["the machines of queue, which chooses them only once a run begins"]
        (asked,) = Queue.asked
        assert asked.submission.options == {"nodes": "8"}
        assert str(asked.submission.run.plan) == "dp=8"
