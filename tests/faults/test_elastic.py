"""Runs whose number of devices changes: the losses are those that would have been, each sample counts once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from test_stopping import events, spec

import phalanx as px
from longer import longer
from phalanx.data import audit
from phalanx.errors import WorkerError
from phalanx.launch import worker
from phalanx.launch.elastic_size import ElasticSize
from phalanx.placement.survey_file import stored_survey

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from small import BATCH, LENGTH, job

pytestmark = pytest.mark.timeout(120)
STEPS, AT = 20, 3
SAME = 1e-6  # relative: sums over another number of ranks are rounded in another order


class TestSize:
    """With how many devices a run goes on, without one."""

    @staticmethod
    def size(there: list[int], steps: int = 6) -> ElasticSize:
        plans = {devices: px.Plan(dp=devices) for devices in (1, 2, 4, 8)}
        return ElasticSize(plans, steps=steps, there=lambda: there[0])

    @staticmethod
    def takes(size: ElasticSize, steps: int) -> bool:
        """Whether it is time to try more, once workers that begin have taken so many steps."""
        size.started()
        for step in range(100, 101 + steps):
            size.reached(step)
        return size.grows()

    def test_it_begins_with_the_most_there_are_and_shrinks_to_the_next(self) -> None:
        there = [5]
        size = self.size(there)
        assert size.devices == 4
        assert not size.lacks_devices()
        assert size.shrink("lost")
        assert (size.devices, size.plan, size.cause) == (2, px.Plan(dp=2), "lost")
        there[0] = 1
        assert size.lacks_devices()
        assert size.shrink("gone")
        assert not size.shrink("gone")

    def test_it_tries_more_after_its_steps_and_goes_back_for_twice_as_long(self) -> None:
        there = [4]
        size = self.size(there)
        size.shrink("lost")
        assert [self.takes(size, 5), self.takes(size, 6)] == [False, True]
        there[0] = 2
        assert not size.grows(), "there are no more"
        there[0] = 4
        size.grow()
        assert (size.devices, size.on_trial) == (4, True)
        size.go_back("it fails there")
        assert (size.devices, size.on_trial) == (2, False)
        assert [self.takes(size, 6), self.takes(size, 12)] == [False, True]
        size.grow()
        for step in range(13):
            size.reached(step)
        assert not size.on_trial, "it has proven itself"

    def test_it_never_tries_more_where_nothing_says_when(self) -> None:
        size = self.size([4], steps=0)
        size.shrink("lost")
        assert not self.takes(size, 1000)


def failing(world: int, strikes: int, folder: Path, *, slow: float = 0.0, steps: int = STEPS) -> Any:
    """The small job; among ``world`` processes the last is killed in step 3, or later in its fourth, so many times.

    With fewer processes each forward pass takes ``slow`` seconds.
    """
    launcher, calls = os.getpid(), list[int]()

    def loss(output: Any, batch: Any) -> Any:
        if os.getpid() != launcher and torch.is_grad_enabled() and psutil.Process().ppid() == launcher:
            ranks = dist.get_world_size() if dist.is_initialized() else 1
            if ranks == world and dist.get_rank() == world - 1:
                calls.extend([1] * (1 if calls else 1 + begun_with(folder / "run")))
                if len(calls) == AT + 1 and len(list(folder.glob("strike-*"))) < strikes:
                    (folder / f"strike-{time.monotonic_ns()}").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            elif ranks < world:
                time.sleep(slow)
        return px.cross_entropy(output, batch["y"])

    return job(loss=loss, epochs=None, steps=steps)


def begun_with(run: Path) -> int:
    """The step that the process, which has taken none, goes on from; 0 where that is no longer before step 3."""
    found = [int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*")]
    return max(found, default=0) if max(found, default=0) <= AT else 0


def sizes(folder: Path) -> list[tuple[int, int]]:
    return [(event["from"], event["to"]) for event in events(folder, "resize")]


def starts(folder: Path) -> list[tuple[str, int]]:
    return [(event["plan"], event["world_size"]) for event in events(folder, "start")]


def is_the_run_that_would_have_been(done: px.Run, steps: int, tmp_path: Path, same: float = SAME) -> None:
    alone = px.fit(job(epochs=None, steps=steps), run=spec("single", tmp_path / "alone"))
    assert done.losses == pytest.approx(alone.losses, rel=same)
    assert len(done.losses) == steps
    assert audit(done.folder / "ledger", length=LENGTH, batch=BATCH, drop_last=False) == []


@pytest.mark.parametrize(
    ("plan", "devices", "world", "fewer"),
    [
        ("dp=2 pp=2", "2:4", 4, "pp=2 micro=16"),
        *longer(*((plan, "1:2", 2, "micro=16") for plan in ("dp=2", "fsdp=2")), ("dp=3", "1:3", 3, "dp=2 micro=11")),
    ],
)
def test_fewer_go_on_after_repeated_losses(plan: str, devices: str, world: int, fewer: str, tmp_path: Path) -> None:
    run = spec(plan, tmp_path / "run", devices=devices, restarts=10, checkpoint_every=2)
    done = px.fit(failing(world, 99, tmp_path), run=run)
    (resize,) = events(run.folder, "resize")
    small = px.Plan.parse(fewer)
    assert (resize["from"], resize["to"]) == (world, small.devices)
    # survivors of dp have saved the last finished step; else it is whether step 2 was saved when step 3 came
    assert resize["step"] in ((3,) if plan.startswith("dp=") and "pp" not in plan else (0, 2))
    assert "SIGKILL" in resize["cause"]
    assert done.plan == small
    survey = stored_survey(run.folder)  # of the plan before it would say that other ranks hold other parts
    assert survey is not None
    assert survey.plan == small
    assert px.RunSpec.from_toml((run.folder / "run.toml").read_text()).plan == px.Plan.parse(plan)
    is_the_run_that_would_have_been(done, STEPS, tmp_path)


def test_the_least_there_may_be_ends_the_run_as_ever(tmp_path: Path) -> None:
    run = spec("dp=2", tmp_path / "run", devices="2:2", restarts=10)
    with pytest.raises(WorkerError, match="SIGKILL"):
        px.fit(failing(2, 99, tmp_path, steps=5), run=run)


def test_it_grows_back_and_that_is_no_restart(tmp_path: Path) -> None:
    run = spec("dp=2", tmp_path / "run", devices="1:2", restarts=3, grow_after=4)
    done = px.fit(failing(2, 3, tmp_path, slow=0.03, steps=60), run=run)
    assert sizes(run.folder) == [(2, 1), (1, 2)]
    assert [plan for plan, _ in starts(run.folder)] == ["dp=2", "dp=2", "dp=2", "micro=16", "dp=2"]
    (stopped,) = events(run.folder, "stopped")
    resumed = [event["step"] for event in events(run.folder, "resume")]
    assert resumed == [AT, AT, AT, stopped["step"]]  # no step is lost
    assert len(events(run.folder, "restart")) == 3  # all that were allowed
    is_the_run_that_would_have_been(done, 60, tmp_path)


JOBFILE = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[1] / "distributed")!r})
from pathlib import Path
import phalanx as px
import small

HERE = Path(__file__).parent

def loss(output, batch):
    if not (HERE / "fast").exists():
        time.sleep(0.2)
    return px.cross_entropy(output, batch["y"])

def job():
    return small.job(loss=loss, epochs=None, steps=int((HERE / "steps").read_text()))
"""


def jobfile(folder: Path, steps: int, *marks: str) -> None:
    (folder / "steps").write_text(str(steps))
    for mark in marks:
        (folder / mark).touch()
    (folder / "shrinking.py").write_text(JOBFILE)


RUNFILE = """
job = "shrinking.py"
plan = "dp=2"
devices = "1:2"
folder = "run"
resume = "auto"
forecast = "none"
checkpoint_every = "2s"
"""
CONF = "keep_alive_interval=3,keep_alive_max_attempt=3,last_call_timeout=5,join_timeout=120"


class Agents:
    """Two agents of torchrun, as on two hosts; the first of them serves the store that both meet at."""

    def __init__(self, folder: Path, *, restarts: int = 3) -> None:
        self._restarts = restarts
        self._folder, self._running = folder, dict[int, subprocess.Popen[bytes]]()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]

    def start(self, number: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", "elastic"]
        command += ["--rdzv-conf", f"{CONF},is_host={int(number == 0)}", "--local-addr", "127.0.0.1"]
        command += ["--max-restarts", str(self._restarts), "--monitor-interval", "0.5"]
        command += ["--no-python", sys.executable, "-m", "phalanx", "worker", "run.toml"]
        env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        with (self._folder / f"agent-{number}.txt").open("ab") as said:
            self._running[number] = subprocess.Popen(command, cwd=self._folder, env=env, stdout=said, stderr=said)
        return self._running[number]

    def end(self) -> None:
        for agent in self._running.values():
            if agent.poll() is None:
                agent.kill()
            agent.wait()

    def said(self) -> str:
        return "\n".join(file.read_text() for file in sorted(self._folder.glob("agent-*.txt")))


def until(reached: Callable[[], bool], agents: Agents, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, agents.said()
        time.sleep(0.2)


@pytest.mark.long  # torchrun takes its time to believe that a host is gone
@pytest.mark.timeout(400)
def test_an_agent_is_lost_and_comes_back(tmp_path: Path) -> None:
    jobfile(tmp_path, 300)
    (tmp_path / "run.toml").write_text(RUNFILE)
    folder, agents = tmp_path / "run", Agents(tmp_path)

    def worlds() -> list[int]:
        return [world for _, world in starts(folder)] if (folder / "events.jsonl").exists() else []

    try:
        first, second = agents.start(0), agents.start(1)
        until(lambda: worlds() == [2] and len(events(folder, "step")) > 10, agents)
        second.kill()
        until(lambda: worlds() == [2, 1], agents)
        second.wait()
        second = agents.start(1)
        until(lambda: worlds() == [2, 1, 2], agents)
        (tmp_path / "fast").touch()
        until(lambda: first.poll() is not None and second.poll() is not None, agents)
        assert (first.returncode, second.returncode) == (0, 0), agents.said()
    finally:
        agents.end()
    assert sizes(folder) == [(2, 1), (1, 2)]
    is_the_run_that_would_have_been(px.api.Run(folder=folder), 300, tmp_path, 1e-5)


@pytest.mark.long
def test_agents_that_share_no_store_need_to_be_told_that_they_may_go_on(tmp_path: Path) -> None:
    jobfile(tmp_path, 5, "fast")
    (tmp_path / "run.toml").write_text(RUNFILE.replace('"auto"', "false"))
    agents = Agents(tmp_path, restarts=0)
    try:
        agents.start(0).wait(timeout=90)
    finally:
        agents.end()
    assert 'resume = "auto"' in agents.said()
    with suppress(FileNotFoundError):
        assert "start" not in (tmp_path / "run" / "events.jsonl").read_text()


def test_workers_that_the_range_has_no_plan_for_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "leave_compiler_out", lambda: None)  # this process is the tests'
    jobfile(tmp_path, 5, "fast")
    (tmp_path / "run.toml").write_text(RUNFILE.replace("dp=2", "pp=2").replace("1:2", "2:4"))
    assert worker.main(tmp_path / "run.toml") == 2
    assert "given 1; allowed: 2, 4" in capsys.readouterr().err


def test_the_page_says_what_the_agents_here_were_given() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "elastic.md").read_text()
    assert f"--rdzv-conf {CONF} " in page
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun" in page
