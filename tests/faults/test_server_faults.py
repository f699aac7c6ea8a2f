"""Servers and workers that die, fall silent or come twice: every run ends, in progress or in an error that says why."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import phalanx as px
import phalanx.checkpoint.store  # once, here: what is forked has it then
from chaos.run_equality import read_ledger
from phalanx.comm import Place
from phalanx.comm.handshake import new_secret
from phalanx.errors import RunError, WorkerError
from phalanx.launch.local import launch
from phalanx.train.interruptions import LauncherLink
from phalanx.train.parameter_server import take_part
from phalanx.train.parameter_server.server_group import Address, Directory, Patience

SAMPLES, EPOCHS = 64, 6  # 4 steps an epoch
QUICK = Patience(beat=0.05, silent=0.4, pieces=0.0, answer=5.0, back=5.0, parting=2.0)


def job() -> px.Job:
    generator = torch.Generator().manual_seed(0)
    data = px.Table(x=torch.randn(SAMPLES, 6, generator=generator), y=torch.randint(3, (SAMPLES,), generator=generator))
    return px.Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)),
        data=lambda: data,
        loss=lambda output, batch: px.cross_entropy(output, batch["y"]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        inputs=lambda batch: batch["x"],
        batch=16,
        epochs=EPOCHS,
    )


def run_of(plan: str, folder: str = "run") -> px.RunSpec:
    return px.RunSpec(job="small", plan=px.Plan.parse(plan), folder=Path(folder), forecast="none")


def served(
    plan: str,
    strike: Callable[[Place, int], None],
    *,
    begin: Callable[[Place], None] = lambda place: None,
    trained: px.Job | None = None,
    patience: Callable[[Place], Patience] = lambda place: QUICK,
    **given: Any,
) -> list[dict[str, Any]]:
    """Run ``plan``; ``strike`` is called with each process's place and the step it begins. Returns the events."""
    run = run_of(plan)

    def work(place: Place, report: Callable[[int], None]) -> dict[str, Any]:
        begin(place)

        def reported(step: int) -> None:
            report(step)
            strike(place, step)

        return take_part(trained or job(), run, place, LauncherLink(report=reported), patience=patience(place))

    launch(work, run.plan.processes, **given)
    ids = np.concatenate([ids for _, ids in read_ledger(run.folder / "ledger").values()])
    assert (np.bincount(ids, minlength=SAMPLES) == EPOCHS).all(), "each sample counts once an epoch, whatever happens"
    events = list(px.Run(folder=run.folder).events())
    assert events[-1]["event"] == "end"
    assert events[-1]["step"] == 24
    return events


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def of(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == name]


@pytest.mark.parametrize("index", [0, 2, 3], ids=["worker", "server 0", "server 1"])
def test_a_killed_process_ends_the_run_and_is_named(index: int) -> None:
    def strike(place: Place, step: int) -> None:
        if place.rank == 0 and step >= 5:
            os.kill(int(Path(f"pid-{index}").read_text()), signal.SIGKILL)

    def begin(place: Place) -> None:
        Path(f"pid-{place.rank}").write_text(str(os.getpid()))

    with pytest.raises(WorkerError, match=f"rank {index} of 4 was ended .*by SIGKILL"):
        served("dp=2 server=2", strike, begin=begin)


def test_a_worker_that_makes_no_progress_ends_the_run_and_is_named() -> None:
    def strike(place: Place, step: int) -> None:
        while place.rank == 1 and step >= 4:
            time.sleep(0.02)
        if place.rank == 0 and step >= 4:
            time.sleep(0.1)  # alone it would come to the end of the run before the other is given up

    quick = replace(QUICK, stuck=1.0)
    with pytest.raises(WorkerError, match="worker 1 was lost: no progress for") as raised:
        served("dp=2 server=1", strike, patience=lambda place: quick)
    assert raised.value.lost


@pytest.fixture
def place() -> Iterator[Place]:
    """The place of the only server of ``dp=1 server=1``, with a store to meet at."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield Place(rank=1, world_size=2, store=f"tcp://127.0.0.1:{store.port}", secret=new_secret())
    del store  # it serves until here


def test_a_run_after_another_knows_nothing_of_it(place: Place) -> None:
    before = Directory(place)
    before.publish(0, Address("127.0.0.1", 1))
    before.ask_to_stop(signal.SIGTERM)
    before.finish()
    after = Directory(replace(place, number=1))
    assert (after.find(0), after.asked_to_stop(), after.over) == (None, 0, False)


def test_a_server_without_its_coordinator_gives_up(place: Place) -> None:
    run = run_of("dp=1 server=2")
    quick = replace(QUICK, back=0.2, parting=0.1)
    with pytest.raises(RunError, match="server 0, which coordinates the others, has not been there for 0"):
        take_part(job(), run, replace(place, rank=2, world_size=3), patience=quick)
