"""``phalanx worker``: alone and under torchrun, an error is said once and the exit code is its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.comm import Place
from phalanx.config import Plan, RunSpec
from phalanx.errors import SpecError
from phalanx.events import read
from phalanx.launch import worker
from phalanx.launch.torchrun import claim, place_from_environment
from phalanx.launch.worker import main

JOB = """
import os
import torch
import phalanx.config as px

CALLS = []

def loss(output, batch):
    CALLS.append(1)
    if len(CALLS) == 3 and os.environ.get("RANK", "1") == "1":
        raise ValueError("the injected fault")
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


def prepare(folder: Path, plan: Plan) -> Path:
    (folder / "job_that_fails.py").write_text(JOB)
    run = RunSpec(job=str(folder / "job_that_fails.py"), plan=plan, folder=folder / "run")
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
    assert [problem.where.split()[-1] for problem in raised.value.problems] == [
        "RANK",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    ]


def test_everyone_speaks_where_nobody_can_be_asked() -> None:
    assert claim(Place(), "anything")


def test_no_run_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(tmp_path / "run.toml") == 2
    assert "No such file" in capsys.readouterr().err


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
    events = list(read(runfile.with_name("events.jsonl")))
    assert events[-1]["event"] == "error"
    assert (events[-1]["rank"], events[-1]["step"], events[-1]["kind"]) == (0, 2, "ValueError")
    capsys.readouterr()
    assert main(runfile) == 2
    assert "holds a run" in capsys.readouterr().err
    assert len(list(read(runfile.with_name("events.jsonl")))) == len(events)


def torchrun(runfile: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", *options]
    return subprocess.run(
        [*command, "-m", "phalanx", "worker", str(runfile)], capture_output=True, text=True, timeout=100
    )


def test_torchrun_says_the_first_error_once(tmp_path: Path) -> None:
    runfile = prepare(tmp_path, Plan(dp=2))
    done = torchrun(runfile)
    assert done.returncode != 0
    assert done.stderr.count("rank 1 of 2 failed in step 2: ValueError: the injected fault") == 1
    assert "rank 0 of 2" not in done.stderr
    assert "Connection closed" not in done.stderr
    assert "exitcode  : 3" in done.stderr
    events = list(read(runfile.with_name("events.jsonl")))
    assert [(event["rank"], event["step"]) for event in events if event["event"] == "error"] == [(1, 2)]
    before = runfile.with_name("events.jsonl").read_bytes()
    again = torchrun(runfile)
    assert again.stderr.count("which holds a run of") == 1
    assert again.stderr.count("exitcode  : 2") >= 1
    assert runfile.with_name("events.jsonl").read_bytes() == before


def test_what_fails_by_its_own_code_is_not_trained_again_however_often_torchrun_would(tmp_path: Path) -> None:
    runfile = prepare(tmp_path, Plan(dp=2))
    done = torchrun(runfile, "--max-restarts", "2")
    assert done.returncode != 0
    events = list(read(runfile.with_name("events.jsonl")))
    kinds = [event["event"] for event in events]
    assert (kinds.count("start"), kinds.count("resume"), kinds.count("error")) == (1, 0, 1)
    assert [event["lost"] for event in events if event["event"] == "error"] == [False]
    again = "own code, which would come again: rank 1 of 2 failed in step 2: ValueError: the injected"
    assert done.stderr.count(again) == 2  # once for each start, whichever rank says it
    assert "go on with resume = true" in done.stderr
