"""``phalanx worker``: alone and under torchrun, an error is said once and the exit code is its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import phalanx as px
from phalanx.comm import Place
from phalanx.config import Plan, RunSpec
from phalanx.errors import SpecError
from phalanx.events import RunLog
from phalanx.launch import worker
from phalanx.launch.torchrun import place_from_environment
from phalanx.launch.worker import WorkerStatus, main

JOB = """
import os
import torch
import phalanx.config as px

CALLS = []

def loss(output, batch):
    CALLS.append(1)
    if len(CALLS) == 3 and os.environ.get("RANK", "1") == "1":
        {fault}
    return output.square().mean()

def job():
    return px.Job(model=lambda: torch.nn.Linear(4, 2), data=lambda: list(torch.ones(32, 4)), loss=loss,
                  optimizer=lambda params: torch.optim.SGD(params, lr=0.1), batch=4, epochs=1)
"""

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


def prepare(folder: Path, plan: Plan, fault: str = 'raise ValueError("the injected fault")', **how: Any) -> Path:
    (folder / "job_that_fails.py").write_text(JOB.format(fault=fault))
    run = RunSpec(job=str(folder / "job_that_fails.py"), plan=plan, folder=folder / "run", **how)
    run.folder.mkdir()
    (run.folder / "run.toml").write_text(run.to_toml())
    return run.folder / "run.toml"


def test_place_from_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place_from_environment() is None
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert place_from_environment() == Place(
        rank=1, world_size=4, local_rank=0, store="env://", meeting="127.0.0.1:29500"
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    place = place_from_environment()
    assert place is not None
    assert place.workers_here == 2


def test_half_of_torchruns_variables_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SpecError) as raised:
        place_from_environment()
    (problem,) = raised.value.problems
    assert problem.given == "RANK=first, LOCAL_RANK=nothing, MASTER_PORT=nothing, MASTER_ADDR=nothing"


def test_plan_of_another_world(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runfile = prepare(tmp_path, Plan(dp=2))
    assert main(runfile) == 2
    assert f"torchrun --nproc-per-node 2 --no-python phalanx worker {runfile}" in capsys.readouterr().err


def test_a_failure_stands_in_the_events_and_the_folder_is_then_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "leave_compiler_out", lambda: None)  # this process is the tests'
    runfile = prepare(tmp_path, Plan())
    assert main(runfile) == 3
    events = RunLog(runfile.parent).events
    assert events[-1]["event"] == "error"
    assert (events[-1]["rank"], events[-1]["step"], events[-1]["kind"]) == (0, 2, "ValueError")
    capsys.readouterr()
    assert main(runfile) == 2
    assert "holds a run" in capsys.readouterr().err
    assert len(RunLog(runfile.parent).events) == len(events)


def test_job_code_that_leaves_has_not_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "leave_compiler_out", lambda: None)  # this process is the tests'
    runfile = prepare(tmp_path, Plan(), fault="raise SystemExit(0)")
    assert main(runfile) == 3
    assert RunLog(runfile.parent).events[-1]["event"] == "error"


def test_what_fails_by_its_own_code_is_said_once_and_not_trained_again_by_torchrun(tmp_path: Path) -> None:
    runfile = prepare(tmp_path, Plan(dp=2))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["--max-restarts", "1", "-m", "phalanx", "worker", str(runfile)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    said = done.stderr
    assert said.count("rank 1 of 2 failed in step 2: ValueError: the injected fault") == 2  # as often as it is started
    assert "rank 0 of 2" not in said
    assert "Connection closed" not in said
    assert "go on with resume = true" in said
    events = RunLog(runfile.parent).events
    kinds = [event["event"] for event in events]
    assert (kinds.count("start"), kinds.count("resume"), kinds.count("error")) == (1, 0, 1)
    (error,) = [event for event in events if event["event"] == "error"]
    assert (error["rank"], error["step"], error["lost"]) == (1, 2, False)


def test_who_does_not_come_is_named_where_ranks_have_no_launcher(tmp_path: Path) -> None:
    """As on several hosts: ranks publish their stacks at the store that they meet at."""
    runfile = prepare(tmp_path, Plan(dp=2), "__import__('time').sleep(600)", timeout=4.0, restarts=0)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [*command, "-m", "phalanx", "worker", str(runfile)], capture_output=True, text=True, timeout=100
    )
    (hang,) = [event for event in RunLog(runfile.parent).events if event["event"] == "hang"]
    assert (hang["ranks"], hang["cause"], hang["step"]) == ([1], "absent", 2)
    assert "job_that_fails.py" in hang["message"]
    assert hang["message"] in done.stderr


def test_an_error_is_recorded_before_the_agents_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's SIGTERM comes as soon as another worker has ended, which left the word to this one."""

    def claim(place: Place, key: str) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        return True

    monkeypatch.setattr(worker, "claim", claim)
    (tmp_path / "run").mkdir()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            status = WorkerStatus(Place(rank=1, world_size=2, store="env://", local_rank=1, local_world_size=2))
            status.folder = tmp_path / "run"
            status.report_failure(ValueError("no such loss"))
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            os._exit(7)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    (event,) = px.Run(folder=tmp_path / "run").events("error")
    assert "no such loss" in event["message"]
    assert (event["rank"], event["lost"]) == (1, False)
