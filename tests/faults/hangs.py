"""Hangs that are planted into a run, each of one kind, at one place, on one rank; and who is to blame for each.

``python tests/faults/hangs.py docs/reference/hangs.md`` plants all of them and writes the page.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import phalanx as px
from phalanx.demo.jobs.gpt import gpt_job, windows
from phalanx.errors import WorkerError
from phalanx.train import mesh_stepper

TIMEOUT = 3.0
"""Seconds that ranks of these runs wait for each other."""

LATE = 5.0
"""Seconds after the timeout within which the report has to be there."""

_STEP = 2  # in which a rank hangs


def sleeps() -> None:
    time.sleep(600)


def loops() -> None:
    while True:
        pass


def is_stopped() -> None:
    """Be stopped by a signal, as a debugger or a batch system does."""
    os.kill(os.getpid(), signal.SIGSTOP)


def waits_for_a_lock() -> None:
    """Wait for a lock that this thread has taken itself."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def holds_the_interpreter() -> None:
    """Stay in compiled code that lets no other thread run Python."""
    while True:
        ctypes.PyDLL(None).sleep(600)


def reads_a_pipe() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pipe")
        os.mkfifo(path)
        path.read_bytes()


def sums_alone() -> None:
    dist.all_reduce(torch.zeros(7))


def gathers_alone() -> None:
    dist.all_gather_object([None] * dist.get_world_size(), "alone")


@dataclass(frozen=True, kw_only=True)
class Hang:
    """``how`` happens on ``rank`` of ``plan``, at ``place`` in what the job says.

    Attributes:
        cause: that the report has to name.
        words: that have to stand in the report.
        workers: processes that load data.
    """

    place: str
    how: Callable[[], None]
    plan: str = "dp=2"
    rank: int = 1
    cause: str = "absent"
    words: tuple[str, ...] = ()
    workers: int = 0

    @property
    def name(self) -> str:
        loaded = " of a loading process" if self.workers else ""
        return f"{self.plan}: rank {self.rank} {self.how.__name__.replace('_', ' ')} in {self.place}{loaded}"


HANGS = [
    Hang(place="forward", how=sleeps),
    Hang(place="forward", how=loops, words=("it computes",)),
    Hang(place="forward", how=is_stopped, cause="stopped", words=("kill -CONT",)),
    Hang(place="forward", how=waits_for_a_lock, words=("waits_for_a_lock",)),
    Hang(place="forward", how=holds_the_interpreter, words=("holds_the_interpreter",)),
    Hang(place="forward", how=sums_alone, cause="mismatch", words=("sums_alone",)),
    Hang(place="loss", how=sleeps, plan="pp=2 micro=2"),
    Hang(place="inputs", how=sleeps, plan="pp=2 micro=2", rank=0),
    Hang(place="loss", how=sleeps, plan="tp=2"),
    Hang(place="forward", how=loops, plan="fsdp=2"),
    Hang(place="loss", how=sleeps, plan="fsdp=2 tp=2", rank=3),
    Hang(place="forward", how=is_stopped, plan="dp=2 fsdp=2", rank=2, cause="stopped"),
    Hang(place="loss", how=sleeps, plan="cp=2"),
    Hang(place="loss", how=sleeps, plan="dp=2 sync=local every=2"),
    Hang(place="backward", how=sleeps),
    Hang(place="loss", how=gathers_alone, cause="mismatch", words=("gathers_alone",)),
    Hang(place="dataset", how=sleeps, words=("loads data",)),
    Hang(place="dataset", how=reads_a_pipe, words=("reads_a_pipe", "its data do not come")),
    Hang(place="dataset", how=sleeps, workers=1, words=("workers=0",)),
    Hang(place="collate", how=loops),
    Hang(place="optimizer", how=sleeps),
    Hang(place="metrics", how=sleeps),
    Hang(place="evaluation data", how=sleeps, rank=0),
    Hang(place="saving", how=sleeps, rank=0),
    Hang(place="forward", how=sleeps, plan="single", rank=0, cause="blocked"),
]


@dataclass
class Planted:
    """Makes the hang of a job's third call of its place on its rank."""

    hang: Hang
    calls: int = 0

    def strike(self, place: str) -> None:
        if place == self.hang.place and rank_here() == self.hang.rank:
            self.calls += 1
            if self.calls == (_STEP + 1 if place not in _ONCE else 1):
                self.hang.how()


_ONCE = ("metrics", "evaluation data", "saving")


def rank_here() -> int | None:
    """The rank of the run that calls this; ``None`` where nobody trains."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "train" and "place" in frame.f_locals:
            return frame.f_locals["place"].rank
        frame = frame.f_back
    return None


class Strikes(torch.nn.Module):
    def __init__(self, planted: Planted) -> None:
        super().__init__()
        self.planted = planted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.planted.strike("forward")
        return x


class Striking(torch.utils.data.Dataset[Any]):
    def __init__(self, table: px.Table, planted: Planted, place: str) -> None:
        self.table, self.planted, self.place = table, planted, place

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        self.planted.strike(self.place)
        return self.table[index]


def job_with(hang: Hang) -> px.Job:
    """A tiny GPT, as users write one, with the hang in it."""
    planted = Planted(hang)
    base = gpt_job(layers=2, width=16, heads=2, context=8, batch=4, steps=6)

    def model() -> torch.nn.Module:
        made = base.model()
        if hang.place == "forward":
            made.norm = torch.nn.Sequential(made.norm, Strikes(planted))
        return made

    def loss(output: torch.Tensor, batch: Any) -> Any:
        planted.strike("loss")
        if hang.place == "backward" and output.requires_grad:
            output.register_hook(lambda gradient: planted.strike("backward"))
        return base.loss(output, batch)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(parameters, lr=0.01)
        made.register_step_pre_hook(lambda *_: planted.strike("optimizer"))
        return made

    def inputs(batch: Any) -> Any:
        planted.strike("inputs")
        return base.inputs(batch) if base.inputs else batch["tokens"][:, :-1]

    def collate(samples: list[Any]) -> Any:
        planted.strike("collate")
        return torch.utils.data.default_collate(samples)

    def metrics(output: torch.Tensor, batch: Any) -> dict[str, px.Loss]:
        planted.strike("metrics")
        return {"mean": px.Loss(output.sum(), output.numel())}

    return replace(
        base,
        model=model,
        data=lambda: Striking(windows(8, "training"), planted, "dataset"),
        loss=loss,
        optimizer=optimizer,
        inputs=inputs,
        collate=collate,
        workers=hang.workers,
        metrics=metrics,
        evaluate=lambda: Striking(windows(8, "evaluation"), planted, "evaluation data"),
    )


@dataclass(frozen=True, kw_only=True)
class Found:
    """What became of a run with a hang in it: the error, and seconds from the hang to it."""

    error: WorkerError
    seconds: float
    event: dict[str, Any]


def run_with(hang: Hang, folder: Path) -> Found:
    marked = folder / "hangs"
    job = job_with(replace(hang, how=_marking(hang.how, marked)))
    run = px.RunSpec(
        job="hangs", plan=px.Plan.parse(hang.plan), folder=folder / "run", timeout=TIMEOUT, forecast="none", restarts=0
    )
    with _saving_strikes(job):
        try:
            px.fit(job, run=run)
        except WorkerError as error:
            seconds = time.time() - marked.stat().st_mtime
            event = next(px.Run(folder=run.folder).events("hang"), {})
            return Found(error=error, seconds=seconds, event=event)
    raise AssertionError("the run went on")


def _marking(how: Callable[[], None], marked: Path) -> Callable[[], None]:
    @functools.wraps(how)
    def marks() -> None:
        marked.touch()
        how()

    return marks


@contextmanager
def _saving_strikes(job: px.Job) -> Iterator[None]:
    """Within, workers that are forked come by "saving" when they write a checkpoint."""
    planted = job.data().planted
    saves = mesh_stepper.MeshStepper.save

    def save(*given: Any, **how: Any) -> Any:
        planted.strike("saving")
        return saves(*given, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh_stepper.MeshStepper, "save", save)
        yield


_PAGE = """# Hangs that are named

Each row is a run of a tiny GPT with a hang planted into the job, on one rank, in its third step or where it first comes
by; `timeout` is {timeout:.0f} s. `make hangs` plants them all and writes this page; `make long` holds each row. Named
is the rank that the error names, so many seconds from the hang to the end of the run (bar: {bar:.0f}).

| plan | planted | rank | named | after | the report says |
| --- | --- | --- | --- | --- | --- |
{rows}

{right} of {all} named right and in time.
"""


def main(page: Path) -> int:
    """Plant every hang and write ``page``. Returns 0 where each was named right and in time."""
    torch.set_num_threads(1)
    rows: list[str] = []
    right = 0
    for hang in HANGS:
        with tempfile.TemporaryDirectory() as folder:
            found = run_with(hang, Path(folder))
        good = (found.error.rank, found.event["cause"]) == (hang.rank, hang.cause) and found.seconds < TIMEOUT + LATE
        right += good
        doing = next(stand["doing"] for stand in found.event["stands"] if stand["rank"] == found.error.rank)
        planted = hang.name.partition(": ")[2].partition(" ")[2].partition(" ")[2]
        cells = [f"`{hang.plan}`", planted, hang.rank, found.error.rank, f"{found.seconds:.1f} s"]
        rows.append(f"| {' | '.join(map(str, cells))} | {found.event['cause']}: it {doing} |")
        print(rows[-1], flush=True)
    text = _PAGE.format(timeout=TIMEOUT, bar=TIMEOUT + LATE, rows="\n".join(rows), right=right, all=len(HANGS))
    page.write_text(text, encoding="utf-8")
    return int(right < len(HANGS))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
