"""Runs in the background by ``px.start``, and processes that load data: none outlives the process that started it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from small import BATCH, LENGTH, batches_of, job, plain_losses, table
from torch.utils.data import Dataset

import phalanx as px
from law_rows import longer
from phalanx.config import Job
from phalanx.data import Lane, Loader
from phalanx.errors import DataError, PhalanxError, RefusedError, RunError, SpecError, WorkerError


@cache
def plain() -> list[float]:
    """Losses of the same training in plain PyTorch."""
    order = [list(range(first, min(first + BATCH, LENGTH))) for first in range(0, LENGTH, BATCH)]
    return plain_losses(batches_of(table().columns, order * 2))


def begun(plan: str, folder: str, **how: Any) -> px.Run:
    settings = {name: how.pop(name) for name in list(how) if name in ("resume", "checkpoint_every")}
    spec = px.RunSpec(job="small", plan=px.Plan(), folder=Path(folder), forecast="none", **settings)
    return px.start(job(shuffle=False, **how), plan, run=spec)


def after(run: px.Run, steps: int) -> px.Run:
    """The run once it has taken so many steps."""
    deadline = time.monotonic() + 60
    while len(run.losses) < steps and time.monotonic() < deadline:
        time.sleep(0.02)
    return run


def test_it_trains_as_plain_pytorch_does() -> None:
    threads = threading.active_count()
    run = begun("dp=2", "run")
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
    assert "SIGTERM: saving after this step" in said
    (stopped,) = run.events("stopped")
    assert run.checkpoint().name == f"step-{stopped['step']:08d}"
    taken = stopped["step"]
    run = after(begun("single", "run", epochs=3000, resume=True), taken + 1)
    run.stop()
    assert next(iter(run.events("resume")))["step"] == taken
    assert run.stop() is run.wait()


def test_several_at_a_time_which_others_read() -> None:
    runs = [begun("single", f"run-{number}") for number in range(2)]
    assert [run.wait().losses for run in runs] == [pytest.approx(plain(), rel=1e-5)] * 2
    run = px.load("run-0")
    assert run.wait().stop() is run
    with pytest.raises(SpecError, match="resume=True"):
        begun("single", "run-0")
    with pytest.raises(PhalanxError):
        px.load("nowhere")


def test_what_is_refused_has_not_begun() -> None:
    with pytest.raises(RefusedError, match="no two layers"):
        begun("tp=2", "run")
    assert not Path("run").exists()
    with pytest.raises(SpecError, match=r"job"):
        px.start(5)


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


def test_wait_gives_up_after_its_time_and_says_how_the_process_ended() -> None:
    run = after(begun("dp=2", "run", epochs=3000), 2)
    with pytest.raises(TimeoutError, match=r"0\.1 s"):
        run.wait(0.1)
    (process,) = psutil.Process().children()
    workers = process.children(recursive=True)
    process.kill()
    with pytest.raises(RunError, match="SIGKILL"):
        run.wait()
    assert psutil.wait_procs(workers, timeout=20)[1] == []


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


@pytest.mark.parametrize("killed", [True, *longer(False)])
def test_it_ends_with_its_caller(killed: bool) -> None:
    command = [sys.executable, "-W", "ignore", "-c", CALLER, *["killed"] * killed]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as caller:
        _, said = caller.communicate(timeout=90)
    assert caller.returncode == (-signal.SIGKILL if killed else 0), said
    run, deadline = px.load("run"), time.monotonic() + 20
    while run.running and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not run.running
    assert len(list(run.events("stopped"))) == (0 if killed else 1)


class Stuck(Dataset[torch.Tensor]):
    """Gives a few samples at once; then reading one takes longer than the test."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= 8:
            time.sleep(60)
        return torch.tensor([os.getpid()])


class Dying(Stuck):
    def __getitem__(self, index: int) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.skipif(sys.platform != "linux", reason="a death signal from the parent is Linux's")
class TestDataWorkers:
    @staticmethod
    def loader(data: Dataset[torch.Tensor]) -> Loader:
        unused: Any = print
        fields: dict[str, Any] = dict.fromkeys(("model", "data", "loss", "optimizer"), unused)
        return Loader(data, Job(**fields, batch=4, epochs=1, workers=2, shuffle=False), Lane(), micro=None)

    def test_a_killed_rank_leaves_none(self) -> None:
        def train() -> None:
            """Load data until killed, and tell which processes load it."""
            pids: set[int] = set()
            for step in self.loader(Stuck()):
                pids |= set(step.parts[0][0].batch.flatten().tolist())
                if step.step == 1:
                    os.write(write_end, json.dumps(sorted(pids)).encode())

        def is_alive(pid: int) -> bool:
            try:
                return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                return False

        read_end, write_end = os.pipe()
        rank = os.fork()
        if rank == 0:
            try:
                train()
            finally:
                os._exit(0)
        try:
            workers = json.loads(os.read(read_end, 1000))
            assert len(workers) == 2
            assert all(map(is_alive, workers))
        finally:
            os.kill(rank, signal.SIGKILL)
            os.waitpid(rank, 0)
        end = time.monotonic() + 20  # left alone they sleep for 60 s
        while any(map(is_alive, workers)) and time.monotonic() < end:
            time.sleep(0.02)
        assert not any(map(is_alive, workers))
        os.close(read_end)
        os.close(write_end)

    def test_a_killed_one_is_explained(self) -> None:
        with pytest.raises(DataError, match="workers=0"):
            list(self.loader(Dying()))
