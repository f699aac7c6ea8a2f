"""Workers that are lost, and devices that come and go: runs end as if nothing had happened, each sample counts once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from hangs import HANGS, Hang, run_with
from small import BATCH, LENGTH, job
from test_stopping import events, spec, striking, undisturbed

import phalanx as px
from law_rows import longer
from phalanx.checkpoint import latest
from phalanx.data import audit
from phalanx.errors import WorkerError
from phalanx.launch import worker
from phalanx.launch.failure import Failure
from phalanx.launch.restarts import Restarts
from phalanx.placement.survey_file import stored_survey

pytestmark = pytest.mark.timeout(120)
STEPS, AT = 20, 3
SAME = 1e-6  # relative: sums over another number of ranks are rounded in another order


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


def is_the_run_that_would_have_been(done: px.Run, steps: int, tmp_path: Path) -> None:
    alone = px.fit(job(epochs=None, steps=steps), run=spec("single", tmp_path / "alone"))
    assert done.losses == pytest.approx(alone.losses, rel=SAME)
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
    assert resize["step"] in (0, 2), "it is whether step 2 was saved when step 3 came"
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


def test_workers_that_the_range_has_no_plan_for_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "leave_compiler_out", lambda: None)  # this process is the tests'
    (tmp_path / "shrinking.py").write_text("from small import job\n")
    runfile = 'job = "shrinking.py"\nplan = "pp=2"\ndevices = "2:4"\nfolder = "run"\nforecast = "none"\n'
    (tmp_path / "run.toml").write_text(runfile)
    assert worker.main(tmp_path / "run.toml") == 2
    assert "given 1; allowed: 2, 4" in capsys.readouterr().err


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    newest = latest(folder / "checkpoints")
    assert newest is not None
    return {name: one for file in newest.glob("*.safetensors") for name, one in load_file(file).items()}


# without checkpoints it begins anew
@pytest.mark.parametrize(
    ("plan", "every"), [("fsdp=2", 2), ("pp=2", 2), *longer(("dp=2", 2), ("dp=2", 0), ("single", 2))]
)
def test_a_killed_worker_is_replaced(plan: str, every: int, tmp_path: Path) -> None:
    run = spec(plan, tmp_path / "run", checkpoint_every=every)
    done = px.fit(striking(be_killed, at=3 if plan != "pp=2" else 1, once=tmp_path / "struck"), run=run)
    (restart,) = events(run.folder, "restart")
    assert (restart["restarts"], "SIGKILL" in restart["cause"]) == (1, True)
    other = undisturbed(plan)
    assert done.losses == other.losses
    assert audit(run.folder / "ledger", length=LENGTH, batch=BATCH, drop_last=False) == []
    mine, theirs = tensors(run.folder), tensors(other.folder)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_who_is_lost_at_the_same_step_every_time_ends_the_run(tmp_path: Path) -> None:
    run = spec("single", tmp_path / "run", restarts=10)
    with pytest.raises(WorkerError, match="was ended in step 3 by SIGKILL"):
        px.fit(striking(be_killed), run=run)
    assert len(events(run.folder, "restart")) == 1  # the second time is no accident
    assert len(events(run.folder, "error")) == 1


def test_who_does_not_come_is_replaced_and_the_log_says_where_it_stood(tmp_path: Path) -> None:
    def strike() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    run = spec("dp=2", tmp_path / "run", checkpoint_every=2, timeout=3)
    done = px.fit(striking(strike, once=tmp_path / "struck"), run=run)
    (hang,), (restart,) = events(run.folder, "hang"), events(run.folder, "restart")
    assert (hang["cause"], restart["step"]) == ("stopped", hang["step"])
    assert hang["ranks"] == [restart["rank"]]
    assert hang["message"] == restart["cause"]
    assert done.losses == undisturbed("dp=2").losses
    assert audit(run.folder / "ledger", length=LENGTH, batch=BATCH, drop_last=False) == []


def failure(step: int | None, number: int = signal.SIGKILL, **how: Any) -> Failure:
    given = {"rank": 1, "kind": f"signal {number}", "message": "", "traceback": "", "time": 0.0, "signal": number}
    return Failure(step=step, **given | how)


class TestWhichFailures:
    def test_as_often_as_was_said(self, tmp_path: Path) -> None:
        restarts = Restarts(3, tmp_path)
        assert [restarts.allow(failure(step)) for step in (5, 6, 7, 8)] == [True, True, True, False]
        assert restarts.count == 3

    def test_a_lost_connection_is_one_and_an_exception_is_none(self, tmp_path: Path) -> None:
        restarts = Restarts(9, tmp_path)
        assert restarts.allow(failure(5, 0, kind="RuntimeError", lost_peer=True))
        assert not restarts.allow(failure(6, 0, kind="ValueError"))

    @pytest.mark.parametrize(("cause", "again"), [("absent", True), ("link", True), ("mismatch", False)])
    def test_a_hang_is_tried_once_more(self, cause: str, again: bool, tmp_path: Path) -> None:
        restarts = Restarts(9, tmp_path)
        hung = failure(5, 0, kind="hang", message="rank 1 did not come", hang={"cause": cause})
        assert restarts.allow(hung) is again
        assert not restarts.allow(hung)  # the second time it is no chance

    @pytest.mark.parametrize("step", [5, None])
    def test_the_same_loss_twice_ends_the_run(self, step: int | None, tmp_path: Path) -> None:
        restarts = Restarts(9, tmp_path)
        assert [restarts.allow(failure(step)) for _ in range(2)] == [True, False]

    def test_what_was_saved_in_between_makes_it_another(self, tmp_path: Path) -> None:
        restarts = Restarts(9, tmp_path)
        for step in range(5):
            (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
            assert restarts.allow(failure(5, signal.SIGSEGV))

    def test_it_waits_longer_each_time(self, tmp_path: Path) -> None:
        restarts, pauses = Restarts(9, tmp_path), list[float]()
        for step in range(8):
            assert restarts.allow(failure(step))
            pauses.append(restarts.pause)
        assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


_ALWAYS = (0, 5)


@pytest.mark.parametrize(
    "hang",
    [
        pytest.param(hang, id=hang.name, marks=() if at in _ALWAYS else pytest.mark.long)
        for at, hang in enumerate(HANGS)
    ],
)
def test_who_does_not_come_is_named(hang: Hang, tmp_path: Path) -> None:
    found = run_with(hang, tmp_path)
    assert found.error.rank == hang.rank
    assert (found.error.kind, found.event["cause"]) == ("hang", hang.cause)
    assert found.event["ranks"] == [hang.rank]
    for word in (f"rank {hang.rank}", *hang.words):
        assert word in str(found.error)
