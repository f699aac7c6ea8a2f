"""Runs that are asked to stop: they save, say so, and go on where they were. Nothing that was trained is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import psutil
import pytest
import torch
from inject import LIMIT, wait_until
from loops import Together
from small import job, table

import phalanx as px
from law_rows import longer
from phalanx.checkpoint import latest
from phalanx.config import Plan, RunSpec
from phalanx.errors import RunError, WorkerError
from phalanx.events import RunLog

STEPS, AT = 8, 3

pytestmark = pytest.mark.timeout(300)


def spec(plan: str, folder: Path, **how: Any) -> RunSpec:
    return RunSpec(job="small", plan=Plan.parse(plan), folder=folder, forecast="none", **how)


def striking(
    strike: Callable[[], None], *, at: int = AT, once: Path | None = None, together: Together | None = None
) -> px.Job:
    """The small job; whoever computes the first loss of step ``at`` strikes, with ``once`` only the first of all.

    ``together``: up to then no worker computes a second loss of a step, as one of servers may where another is late.
    """
    launcher, calls = os.getpid(), list[int]()

    def loss(output: Any, batch: Any) -> Any:
        if os.getpid() != launcher and torch.is_grad_enabled() and psutil.Process().ppid() == launcher:
            calls.append(1)
            if together and len(calls) <= at + 1:
                together.meet()
            if len(calls) == at + 1 and (once is None or _first(once)):
                strike()
        return px.cross_entropy(output, batch["y"])

    return job(loss=loss, epochs=None, steps=STEPS)


def _first(file: Path) -> bool:
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@cache
def undisturbed(plan: str) -> px.Run:
    folder = Path(mkdtemp(prefix="undisturbed-"))
    return px.fit(job(epochs=None, steps=STEPS), run=spec(plan, folder / "run"))


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in RunLog(folder).events if event["event"] == name]


def stops(given: px.Job, run: RunSpec, watch: Callable[[], None] | None = None) -> int:
    with pytest.raises((KeyboardInterrupt, SystemExit)) as stop:
        px.fit(given, run=run, watch=watch)
    return getattr(stop.value, "code", 130)


CASES = [
    *(("single", signal.SIGUSR1, 75), ("pp=2", signal.SIGHUP, 75), ("dp=2", signal.SIGINT, 130)),
    *longer(*((plan, signal.SIGTERM, 75) for plan in ("fsdp=2", "dp=2 sync=local every=4", "dp=2 server=1"))),
]


@pytest.fixture
def _terminal() -> Iterator[None]:
    """What SIGHUP does where these tests were not started by nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_terminal")
@pytest.mark.parametrize(("plan", "number", "code"), CASES)
def test_a_signal_stops_the_run_with_a_checkpoint(plan: str, number: int, code: int, tmp_path: Path) -> None:
    launcher, run = os.getpid(), spec(plan, tmp_path / "run")
    together = Together(tmp_path / "workers", 2) if "server" in plan else None
    given = striking(lambda: os.kill(launcher, number), once=tmp_path / "struck", together=together)
    slow = replace(given, loss=lambda output, batch: (time.sleep(0.02), given.loss(output, batch))[1])
    assert stops(replace(slow, steps=400), run) == code
    (stopped,) = events(run.folder, "stopped")
    assert stopped["signal"] == signal.Signals(number).name
    assert AT < stopped["step"] < 400
    newest = latest(run.folder / "checkpoints")
    assert newest is not None
    assert newest.name == f"step-{stopped['step']:08d}"  # none of its steps is lost
    assert not events(run.folder, "end")


@pytest.mark.parametrize("plan", ["dp=2 server=1", *longer("dp=2")])
def test_one_worker_that_is_asked_is_enough(plan: str, tmp_path: Path) -> None:
    run = spec(plan, tmp_path / "run")
    given = striking(lambda: os.kill(os.getpid(), signal.SIGTERM), once=tmp_path / "struck")
    slow = replace(given, loss=lambda output, batch: (time.sleep(0.02), given.loss(output, batch))[1])
    assert stops(replace(slow, steps=400), run) == 75
    (stopped,) = events(run.folder, "stopped")
    done = px.fit(job(epochs=None, steps=stopped["step"] + 2), run=replace(run, resume=True))
    steps = [event["step"] for event in done.events("step")]
    assert steps == list(range(stopped["step"] + 2))  # each was taken once
    assert not list(done.events("restart"))


def test_what_goes_on_is_the_run_that_would_have_been(tmp_path: Path) -> None:
    launcher, run = os.getpid(), spec("dp=2", tmp_path / "run", resume="auto")
    given = striking(lambda: os.kill(launcher, signal.SIGTERM), once=tmp_path / "struck")
    assert stops(given, run) == 75
    assert px.fit(given, run=run).losses == undisturbed("dp=2").losses


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    """Both from the launcher itself: of two that come while it has no core it would see one."""
    struck, sent = tmp_path / "struck", list[int]()

    def twice() -> None:
        if struck.exists():
            os.kill(os.getpid(), signal.SIGTERM)
            sent.append(1)

    given = striking(lambda: time.sleep(600), once=struck)
    assert stops(given, spec("single", tmp_path / "run", grace=600.0), twice) == 143
    assert len(sent) < 3
    assert latest(tmp_path / "run" / "checkpoints") is None


@pytest.mark.parametrize("grace", [0.0, *longer(0.3)])
def test_when_the_time_to_save_is_over_the_newest_checkpoint_stands(grace: float, tmp_path: Path) -> None:
    launcher = os.getpid()

    def hang() -> None:
        assert wait_until(lambda: latest(run.folder / "checkpoints") is not None, LIMIT)  # a thread writes it
        os.kill(launcher, signal.SIGTERM)
        time.sleep(600)

    run = spec("single", tmp_path / "run", checkpoint_every=2, grace=grace)
    assert stops(striking(hang), run) == 143
    newest = latest(run.folder / "checkpoints")
    assert newest is not None
    assert newest.name == "step-00000002"


class TestEvaluation:
    @staticmethod
    def failing(when: Callable[[], bool]) -> px.Job:
        def metrics(output: Any, batch: Any) -> dict[str, Any]:
            if when():
                raise ValueError("the metric fails")
            return {"accuracy": px.accuracy(output, batch["y"])}

        return job(epochs=None, steps=STEPS, evaluate=lambda: table(50), metrics=metrics)

    def test_what_fails_after_the_last_step_leaves_its_checkpoint(self, tmp_path: Path) -> None:
        calls: list[int] = []
        given = self.failing(lambda: len(calls.append(1) or calls) > 2)  # two batches of 50 samples
        run = spec("single", tmp_path / "run")
        with pytest.raises(WorkerError, match="the metric fails"):
            px.fit(given, run=run)
        newest = latest(run.folder / "checkpoints")
        assert newest is not None
        assert newest.name == f"step-{STEPS:08d}"
        done = px.fit(self.failing(lambda: False), run=replace(run, resume=True))
        assert done.evaluation is not None
        assert len(list(done.events("step"))) == STEPS

    @pytest.mark.parametrize("plan", ["dp=2 server=1", *longer("single")])
    def test_what_always_fails_does_so_before_the_first_step(self, plan: str, tmp_path: Path) -> None:
        run = spec(plan, tmp_path / "run")
        with pytest.raises(RunError, match="the metric fails"):
            px.fit(self.failing(lambda: True), run=run)
        assert not events(run.folder, "step")

    def test_a_long_evaluation_is_left_for_a_request_to_stop(self, tmp_path: Path) -> None:
        launcher, seen = os.getpid(), list[int]()

        def metrics(output: Any, batch: Any) -> dict[str, Any]:
            seen.append(1)
            if len(seen) == 3:  # one was evaluated before the first step
                os.kill(launcher, signal.SIGTERM)
            time.sleep(0.05)
            return {"accuracy": px.accuracy(output, batch["y"])}

        given = job(steps=20, epochs=None, evaluate=lambda: table(20000), metrics=metrics, evaluate_every=5)
        run = spec("single", tmp_path / "run")
        assert stops(given, run) == 75
        assert [event["step"] for event in events(run.folder, "stopped")] == [5]
        assert not events(run.folder, "evaluate")
