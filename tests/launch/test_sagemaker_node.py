"""The containers of a job of SageMaker as processes of this machine: they train as one device, stop and go on.

Each has a folder in place of ``/opt/ml``, on a host of its own where a job has several.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import pytest
from launched import NEEDED, await_none_left, await_steps, by_hand, shared, submission, until, write_job

import phalanx as px
from emulator import Hosts
from phalanx.launch.reaper import SAVED, die_with, fork
from phalanx.launch.runfile import newest_step
from phalanx.launch.targets import sagemaker_node
from phalanx.launch.targets.code_pack import CodePack
from phalanx.launch.targets.sagemaker import SageMakerTarget
from phalanx.launch.targets.sagemaker_node import main
from phalanx.launch.targets.target import Submission

pytestmark = pytest.mark.timeout(240)
REQUIRED = {**NEEDED["sagemaker"], "instance": "ml.m5.large"}
STEPS = 30


@final
class Containers:
    """Those of the job that is handed over, each with a root ``algo-N`` in ``folder``."""

    def __init__(self, given: Submission, folder: Path, hosts: Hosts | None) -> None:
        prepared = SageMakerTarget("").prepare(given)
        self._asked: dict[str, Any] = json.loads(prepared.files[given.folder / "training-job.json"])
        self._runfile, self._code = prepared.files[given.runfile], folder / "code.tar.gz"
        digest = CodePack.of(Path(given.run.job).parent, without=given.run.folder).write(self._code)
        self._asked["HyperParameters"]["code.tar.gz-sha256"] = digest  # as submit does
        self._folder, self._hosts = folder, hosts
        self._names = [hosts.address(number) for number in range(hosts.count)] if hosts else ["algo-1"]
        self.roots = [folder / f"algo-{number + 1}" for number in range(len(self._names))]
        self._pids: list[int] = []
        self.start()

    def start(self) -> None:
        """Start them, on new machines; once more where the capacity had been taken back."""
        for name, root in zip(self._names, self.roots, strict=True):
            self._set_up(name, root)
        self._pids = [self._started(number) for number in range(len(self.roots))]

    @property
    def run(self) -> Path:
        """The run folder, as this machine sees it."""
        run = self._asked["HyperParameters"]["run"]
        return self.roots[0] / "checkpoints" if run.startswith("s3://") else self._folder / run

    def signal(self) -> None:
        """As SageMaker sends it: to the first process of each, as it may come, as the one before has ended."""
        for pid in self._pids:
            os.kill(pid, signal.SIGTERM)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    def wait(self, seconds: float = 180) -> list[int]:
        """Wait for their end. Returns the exit codes."""
        codes: dict[int, int] = {}

        def ended() -> bool:
            for pid in self._pids:
                if pid not in codes and (found := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[pid] = os.waitstatus_to_exitcode(found[1])
            return len(codes) == len(self._pids)

        until(ended, seconds, "they have ended")
        pids, self._pids = self._pids, []
        return [codes[pid] for pid in pids]

    def said(self) -> str:
        """What they have printed."""
        return "\n".join(root.with_suffix(".out").read_text(errors="replace") for root in self.roots)

    def failure(self, number: int = 0) -> str:
        """What a container has left as its reason to fail."""
        path = self.roots[number] / "output" / "failure"
        return path.read_text() if path.exists() else ""

    def close(self) -> None:
        """End them all, by force."""
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def _set_up(self, name: str, root: Path) -> None:
        """Leave below the root of a new machine what SageMaker copies there: of S3, no empty folders and no links."""
        saved = root / "checkpoints"
        files = [path for path in saved.rglob("*") if path.is_file() and not path.is_symlink()]
        kept = {path: path.read_bytes() for path in files}
        shutil.rmtree(root, ignore_errors=True)
        config, data = root / "input" / "config", root / "input" / "data"
        config.mkdir(parents=True)
        (config / "hyperparameters.json").write_text(json.dumps(self._asked["HyperParameters"]))
        place = {"current_host": name, "hosts": self._names, "network_interface_name": "net0"}
        (config / "resourceconfig.json").write_text(json.dumps(place))
        for channel in self._asked["InputDataConfig"]:
            there = data / channel["ChannelName"]
            if "S3DataSource" in channel["DataSource"]:
                there.mkdir(parents=True)
                shutil.copy(self._code, there)
                (there / "run.toml").write_text(self._runfile)
            else:
                (self._folder / "shared").mkdir(exist_ok=True)
                there.symlink_to(self._folder / "shared")
        if "CheckpointConfig" in self._asked:
            saved.mkdir()
        for path, content in kept.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def _started(self, number: int) -> int:
        launcher, root = os.getpid(), self.roots[number]
        words = [*self._asked["AlgorithmSpecification"]["ContainerEntrypoint"], str(root)]
        out = os.open(root.with_suffix(".out"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        pid = fork()
        if pid == 0:
            try:
                die_with(launcher)
                if self._hosts:
                    self._hosts.enter(number * self._hosts.per_host)
                os.setsid()
                os.dup2(out, 1)
                os.dup2(out, 2)
                path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
                os.execvpe(words[0], words, {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"})
            finally:
                os._exit(1)
        os.close(out)
        return pid


Start = Callable[..., Containers]


@pytest.fixture
def start(tmp_path: Path, hosts: Callable[..., Hosts]) -> Iterator[Start]:
    """Starts the containers of a job on so many hosts; none outlives the test."""
    made: list[Containers] = []

    def begin(plan: str, job: Path, *, count: int = 1, **run: Any) -> Containers:
        options = {**REQUIRED, "nodes": str(count), **(shared(tmp_path) if count > 1 else {})}
        settings: dict[str, Any] = {"job": str(job), "grace": 20.0, **run}
        given = replace(submission("sagemaker", tmp_path, plan, run=settings, **options), python=SageMakerTarget.python)
        made.append(Containers(given, tmp_path, hosts(count) if count > 1 else None))
        return made[-1]

    yield begin
    for one in made:
        one.close()
    await_none_left(tmp_path)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """The folder of the job."""
    (tmp_path / "job").mkdir()
    return tmp_path / "job"


@pytest.mark.parametrize("plan", ["dp=2", "pp=2 tp=2"])
def test_hosts_train_what_one_device_does(start: Start, code: Path, plan: str) -> None:
    job = start(plan, write_job(code, steps=6), count=2)
    assert job.wait() == [0, 0], job.said()
    assert px.load(job.run).losses == pytest.approx(by_hand(6), rel=1e-5)
    assert [job.failure(number) for number in range(2)] == ["", ""]
    assert "Traceback" not in job.said()


@pytest.mark.parametrize("count", [1, 2])
def test_hosts_that_are_taken_back_save_and_go_on(start: Start, code: Path, count: int) -> None:
    """No sample is lost or taken twice, and losses are those of one device that nobody has stopped."""
    job = start("dp=2", write_job(code, steps=STEPS, pause=0.3), count=count)
    await_steps(job.run, 3)
    job.signal()
    assert job.wait() == [SAVED] * count, job.said()
    (stopped,) = px.load(job.run).events("stopped")
    assert newest_step(job.run) == stopped["step"] < STEPS
    assert [job.failure(number) for number in range(count)] == [""] * count
    job.start()
    assert job.wait() == [0] * count, job.said()
    run = px.load(job.run)
    assert [event["step"] for event in run.events("resume")] == [stopped["step"]]
    assert [event["step"] for event in run.events("step")] == [*range(STEPS)], "none was taken twice"
    assert run.losses == pytest.approx(by_hand(STEPS), rel=1e-5)


def test_why_a_job_failed_is_left_for_sagemaker_and_each_line_says_its_rank(start: Start, code: Path) -> None:
    path = write_job(code, steps=3)
    spoilt = "    print('computing')\n    raise ValueError('no such loss')"
    path.write_text(path.read_text().replace("    time.sleep(PAUSE)", spoilt))
    job = start("dp=2", path, restarts=0)
    assert job.wait() == [1], job.said()
    assert "no such loss" in job.failure()
    assert re.match(r"rank [01]", job.failure())  # the other may have been ended before its own error
    assert len(job.failure()) <= 1024
    lines = job.said().splitlines()
    assert {line for line in lines if "computing" in line} <= {"[rank 0] computing", "[rank 1] computing"}
    assert any(line.startswith(("[rank 0] ", "[rank 1] ")) and "no such loss" in line for line in lines)


def test_a_signal_before_there_are_workers_ends_it_at_once(start: Start, code: Path) -> None:
    job = start("dp=2", write_job(code, pause=1.0))
    until((job.roots[0] / "phalanx" / "run.toml").exists, 90, "its code is there")
    job.signal()
    assert job.wait() == [SAVED], job.said()
    assert job.failure() == ""


def container(root: Path, **hyperparameters: str) -> Path:
    """A root with as little as a container may have."""
    config = root / "input" / "config"
    config.mkdir(parents=True)
    (root / "input" / "data" / "code").mkdir(parents=True)
    (config / "hyperparameters.json").write_text(json.dumps(hyperparameters))
    place = {"current_host": "algo-1", "hosts": ["algo-1"], "network_interface_name": "eth0"}
    (config / "resourceconfig.json").write_text(json.dumps(place))
    return root


@pytest.fixture
def _signals_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_signals_as_before")
class TestBeforeWorkers:
    def test_code_that_is_not_there(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        root = container(tmp_path)
        assert main(root) == 3
        assert "code.tar.gz is not there" in capsys.readouterr().err
        assert "code.tar.gz is not there" in (root / "output" / "failure").read_text()

    def test_code_that_is_another(self, tmp_path: Path) -> None:
        root = container(tmp_path, **{"code.tar.gz-sha256": "0" * 64})
        for name in ("code.tar.gz", "run.toml"):
            (root / "input" / "data" / "code" / name).write_bytes(b"another")
        assert main(root) == 3
        assert "is not what was sent" in (root / "output" / "failure").read_text()
        assert not (root / "phalanx" / "code").exists()

    def test_a_signal_ends_it_whatever_it_interrupts(self) -> None:
        """Such as an import that takes what is raised for its own failure."""
        pid = fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, sagemaker_node._leave)
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(10)
            except BaseException:
                os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == SAVED


_LAST_LINES = """
import os, subprocess, sys
from pathlib import Path
from phalanx.launch.reaper import adopt_orphans, await_orphans
from phalanx.launch.targets.node_agent import worker_words

adopt_orphans()
words = worker_words(Path("run.toml"), Path(sys.argv[2]), marked=True)
words[3] = sys.argv[1]  # in place of this Python
code = subprocess.run(words, env={**os.environ, "RANK": "3"}).returncode
await_orphans(20)
sys.exit(code)
"""


def test_each_line_says_its_rank_and_the_last_are_there_when_the_container_ends(tmp_path: Path) -> None:
    worker = tmp_path / "python"
    worker.write_text("#!/bin/sh\necho \"$@\"\nsleep 0.1\necho 'ValueError: no' >&2\nprintf 'no end'\nexit 3\n")
    worker.chmod(0o755)
    words = [sys.executable, "-c", _LAST_LINES, str(worker), str(tmp_path)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3
    assert done.stdout.splitlines() == [
        f"[rank 3] {line}" for line in ("-m phalanx worker run.toml", "ValueError: no", "no end")
    ]
    assert (tmp_path / "rank-3.log").read_text().endswith("ValueError: no\nno end")
