"""``px.start``: runs in the background, which end with the process that began them, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from small import BATCH, LENGTH, job, table
from torch import nn

import phalanx as px
from phalanx.errors import PhalanxError, RefusedError, RunError, SpecError, WorkerError


def plain() -> list[float]:
    """Losses of the same training in plain PyTorch."""
    from phalanx.train.build_model import build_model

    model, data, losses = build_model(job()), table(), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        for first in range(0, LENGTH, BATCH):
            batch = data.__getitems__(np.arange(first, min(first + BATCH, LENGTH)))
            loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def spec(folder: str, **how: Any) -> px.RunSpec:
    return px.RunSpec(job="small", plan=px.Plan(), folder=Path(folder), forecast="none", **how)


def begun(plan: str, folder: str, **how: Any) -> px.Run:
    settings = {name: how.pop(name) for name in list(how) if name in ("resume", "checkpoint_every")}
    return px.start(job(shuffle=False, **how), plan, run=spec(folder, **settings))


def after(run: px.Run, steps: int) -> px.Run:
    """The run once it has taken so many steps."""
    deadline = time.monotonic() + 60
    while len(run.losses) < steps and time.monotonic() < deadline:
        time.sleep(0.02)
    return run


@pytest.mark.parametrize("plan", ["single", "dp=2", "fsdp=2"])
def test_it_trains_as_plain_pytorch_does(plan: str) -> None:
    threads = threading.active_count()
    run = begun(plan, "run")
    assert threading.active_count() == threads
    assert run.wait() is run
    assert not run.running
    assert run.losses == pytest.approx(plain(), rel=1e-5)
    assert run.model() is not None


def test_stopped_it_saves_and_another_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    run = after(begun("dp=2", "run", epochs=3000), 5)
    assert run.running
    assert not run.stop().running
    said = capfd.readouterr().err
    assert "asked to stop: saving after this step, 30 s at most\n" in said
    assert "SIGTERM" not in said
    (stopped,) = run.events("stopped")
    assert run.checkpoint().name == f"step-{stopped['step']:08d}"
    taken = stopped["step"]
    run = after(begun("single", "run", epochs=3000, resume=True), taken + 1)
    run.stop()
    assert next(iter(run.events("resume")))["step"] == taken
    assert run.stop() is run.wait()


def test_several_at_a_time() -> None:
    runs = [begun("single", f"run-{number}") for number in range(2)]
    assert [run.wait().losses for run in runs] == [pytest.approx(plain(), rel=1e-5)] * 2


def test_what_is_refused_has_not_begun() -> None:
    with pytest.raises(RefusedError, match="no two layers"):
        begun("tp=2", "run")
    assert not Path("run").exists()
    begun("single", "run").wait()
    with pytest.raises(SpecError, match="or resume=True to go on"):
        begun("single", "run")
    with pytest.raises(SpecError, match=r"job"):
        px.start(5)  # pyright: ignore[reportArgumentType]


def test_a_failure_is_raised_by_wait() -> None:
    def loss(output: torch.Tensor, batch: Any) -> Any:
        if torch.distributed.is_initialized():
            raise ValueError("of the job's own")
        return px.cross_entropy(output, batch["y"])

    run = begun("dp=2", "run", loss=loss)
    for _ in range(2):
        with pytest.raises(WorkerError, match="of the job's own") as failed:
            run.wait()
    assert (failed.value.step, failed.value.kind) == (0, "ValueError")
    assert "in loss" in failed.value.traceback


def test_time_runs_out() -> None:
    run = begun("single", "run", epochs=3000)
    with pytest.raises(TimeoutError, match=r"goes on after 0\.1 s"):
        run.wait(0.1)
    run.stop()


def test_its_process_is_killed() -> None:
    run = after(begun("dp=2", "run", epochs=3000), 2)
    (process,) = psutil.Process().children()
    workers = process.children(recursive=True)
    process.kill()
    with pytest.raises(RunError, match="was ended by SIGKILL"):
        run.wait()
    assert psutil.wait_procs(workers, timeout=5)[1] == []


CALLER = f"""
import os, signal, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
import phalanx as px
from small import job
run = px.start(job(epochs=3000), "dp=2", folder="run")
while len(run.losses) < 3:
    time.sleep(0.02)
sys.argv[1:] and os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("killed", [False, True])
def test_it_ends_with_its_caller(killed: bool) -> None:
    command = [sys.executable, "-W", "ignore", "-c", CALLER, *["killed"] * killed]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as caller:
        _, said = caller.communicate(timeout=90)
    assert caller.returncode == (-signal.SIGKILL if killed else 0), said
    run, deadline = px.load("run"), time.monotonic() + 5
    while run.running and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not run.running
    assert len(list(run.events("stopped"))) == (0 if killed else 1)


def test_a_run_of_another_process() -> None:
    begun("single", "run").wait()
    run = px.load("run")
    assert run.wait().stop() is run
    with pytest.raises(PhalanxError):
        px.load("nowhere")
