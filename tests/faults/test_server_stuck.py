"""A worker whose main thread stands still while its signs of life go on: others get its piece, then it is replaced."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_server_faults import EPOCHS, QUICK, SAMPLES, await_file, job, of, run_of, states_of

import phalanx as px
import phalanx.checkpoint.store  # once, here: what is forked has it then
from phalanx.comm import Place
from phalanx.comm.frames import Connection
from phalanx.data import read_ledger
from phalanx.errors import WorkerError
from phalanx.launch.local import launch
from phalanx.train.launcher_link import LauncherLink
from phalanx.train.parameter_server import take_part
from phalanx.train.parameter_server.server_group import Patience
from phalanx.train.parameter_server.server_links import ServerLinks


@pytest.fixture
def always_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sign of life comes late, whatever else this machine has to do."""
    heard = property(lambda self: time.monotonic(), lambda self, when: None)
    monkeypatch.setattr(Connection, "heard", heard, raising=False)


def await_return(after: str) -> None:
    """Wait, in the last step of the other worker, until rank 1 is back since it first was ``after``."""
    while not ((states := states_of(1)) and after in states and "returned" in states[states.index(after) :]):
        time.sleep(0.02)


class Sleeper(torch.nn.Sequential):
    """Sleeps in the forward of one worker, once, for as long as ``asleep`` says."""

    rank, generation, steps = -1, 0, 0
    asleep: Callable[[], bool] = staticmethod(lambda: False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        Sleeper.steps += 1
        if (Sleeper.rank, Sleeper.generation, Sleeper.steps) == (1, 0, 4):
            Path("asleep").touch()
            while Sleeper.asleep():
                time.sleep(0.02)
        return super().forward(input)


def slept(asleep: Callable[[], bool], after: str, patience: Patience, *, reserves: int) -> list[dict[str, Any]]:
    """The events of a run in which rank 1 sleeps in its fourth forward, and is ``after`` that by what others see."""
    run = run_of("dp=2 server=1")
    small = lambda: Sleeper(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))  # noqa: E731

    def work(place: Place, report: Callable[[int], None]) -> dict[str, Any]:
        Sleeper.rank, Sleeper.generation, Sleeper.asleep = place.rank, place.generation, staticmethod(asleep)

        def reported(step: int) -> None:
            report(step)
            if place.rank == 0 and step >= 4:
                await_file("asleep")  # one alone would be through before the other comes so far
            if place.rank == 0 and step == 23:
                await_return(after)  # the run is over only once the other is back

        waits = patience if place.rank else replace(patience, stuck=60.0)  # who waits here is not to end itself
        return take_part(replace(job(), model=small), run, place, LauncherLink(report=reported), patience=waits)

    launch(work, 3, reserves=reserves)
    ids = np.concatenate([ids for _, ids in read_ledger(run.folder / "ledger").values()])
    assert (np.bincount(ids, minlength=SAMPLES) == EPOCHS).all()
    events = list(px.Run(folder=run.folder).events())
    assert events[-1]["event"] == "end"
    return [event for event in of(events, "worker") if event["rank"] == 1]


@pytest.mark.usefixtures("always_heard")
def test_a_worker_that_stands_still_holds_nobody_up() -> None:
    told = slept(lambda: states_of(1)[-1:] != ["silent"], "silent", QUICK, reserves=0)
    assert [event["state"] for event in told[:3]] == ["joined", "silent", "returned"]
    assert "no progress for" in told[1]["reason"]
    assert "of step" in told[1]["reason"]


@pytest.mark.usefixtures("always_heard")
def test_a_worker_that_stands_still_for_too_long_is_lost_and_replaced(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = ServerLinks._end_process

    def ends_later(self: ServerLinks, still: float) -> None:
        """Both look at the time: here the coordinator does so first."""
        while "lost" not in states_of(1):
            time.sleep(0.02)
        ends(self, still)

    monkeypatch.setattr(ServerLinks, "_end_process", ends_later)
    told = slept(lambda: True, "lost", replace(QUICK, stuck=1.0), reserves=1)
    states = [event["state"] for event in told]
    assert states[0] == "joined"
    assert "returned" in states[states.index("lost") :]
    assert "no progress for" in told[states.index("lost")]["reason"]
    said = capfd.readouterr().err
    assert re.search(r"worker 1 has made no progress for \d+ s and ends", said)
    assert "in forward" in said, "the stack says where it stood"


def stopped(strike: Callable[[Place, int], None], **given: Any) -> list[dict[str, Any]]:
    """The events of a run whose processes are asked at each step what they do to themselves.

    It goes beyond step 10 only once rank 1 is about to stop.
    """
    run = run_of("dp=2 server=1")

    def work(place: Place, report: Callable[[int], None]) -> dict[str, Any]:
        def reported(step: int) -> None:
            report(step)
            strike(place, step)
            if place.rank == 0 and step >= 10:
                await_file("pid")

        # Only the launcher ends anybody here: a rank that waits for the other to be back would be taken for stuck.
        return take_part(job(), run, place, LauncherLink(report=reported), patience=replace(QUICK, stuck=60.0))

    launch(work, 3, **given)
    ids = np.concatenate([ids for _, ids in read_ledger(run.folder / "ledger").values()])
    assert (np.bincount(ids, minlength=SAMPLES) == EPOCHS).all()
    events = list(px.Run(folder=run.folder).events())
    assert events[-1]["event"] == "end"
    assert not Path(f"/proc/{Path('pid').read_text()}").exists()
    return [event for event in of(events, "worker") if event["rank"] == 1]


def freeze(place: Place) -> None:
    """Stop this process if it is the first of rank 1, for good: nobody wakes it."""
    if (place.rank, place.generation) == (1, 0):
        Path("pid.new").write_text(str(os.getpid()))
        Path("pid.new").rename("pid")
        os.kill(os.getpid(), signal.SIGSTOP)


def test_a_worker_that_is_stopped_for_too_long_is_ended_and_replaced(capfd: pytest.CaptureFixture[str]) -> None:
    def strike(place: Place, step: int) -> None:
        if step >= 4:
            freeze(place)
        if place.rank == 0 and step == 23:
            await_return("lost")  # the run is over only once the other is back

    states = [event["state"] for event in stopped(strike, timeout=2.0, reserves=1)]
    assert states[:2] == ["joined", "silent"]
    assert "returned" in states[states.index("lost") :]
    assert re.search(r"worker 1 has been stopped for \d+ s and is ended", capfd.readouterr().err)


def test_a_worker_that_is_stopped_does_not_outlive_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    told = stopped(lambda place, step: freeze(place) if step >= 4 else None, timeout=60.0, reserves=1)
    assert [event["state"] for event in told[:2]] == ["joined", "silent"]
    assert "worker 1 has been stopped for" in capfd.readouterr().err
    assert time.monotonic() - began < 30


def test_one_that_nobody_can_replace_ends_soon_after_the_others() -> None:
    began = time.monotonic()

    def strike(place: Place, step: int) -> None:
        if place.rank == 0 and step >= 3 and place.generation == 0:
            os.kill(os.getpid(), signal.SIGKILL)  # the one reserve is used up
        if step >= 6:
            freeze(place)

    with pytest.raises(WorkerError, match=r"rank 1 of 3 was ended in step .* by SIGKILL"):
        stopped(strike, timeout=60.0, reserves=1)
    assert list(px.Run(folder=Path("run")).events())[-1]["event"] == "end", "the training is whole"
    assert time.monotonic() - began < 30
