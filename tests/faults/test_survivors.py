"""Workers that are lost while others hold all there is: the others save it, and no step is computed again."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from inject import wait_until
from safetensors.torch import load_file
from small import BATCH, LENGTH, Net, job
from test_stopping import STEPS, events, spec, striking
from torch import nn

import phalanx as px
from law_rows import longer
from phalanx.checkpoint import read_state
from phalanx.config import RunSpec
from phalanx.data import audit
from phalanx.errors import WorkerError

pytestmark = pytest.mark.timeout(120)

_launcher = os.getpid()


class WithStatistics(nn.Module):
    """Running means and variances, which every forward changes, and a count of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.net = nn.BatchNorm1d(9), Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.norm(x))


class Wide(nn.Module):
    """Enough parameters for several messages of gradients, so that one may arrive and the next not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(9, 700), *(nn.Linear(700, 700) for _ in range(4)), nn.Linear(700, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_killed_after(path: Path) -> None:
    wait_until(path.exists, 10)
    be_killed()


@dataclass(frozen=True, kw_only=True)
class Strike:
    """``how`` happens once, on ``rank``, in ``step``, at ``place``: forward, backward, update, updated."""

    rank: int
    step: int
    place: str
    once: Path
    how: Callable[[], None] = be_killed

    def strike(self, place: str, step: int) -> None:
        if (place, step) == (self.place, self.step) and dist.is_initialized() and dist.get_rank() == self.rank:
            try:
                self.once.touch(exist_ok=False)
            except FileExistsError:
                return
            self.how()


def job_of(strike: Strike | None = None, *, model: Callable[[], nn.Module] = Net, **how: Any) -> px.Job:
    done = [0]

    def at(place: str) -> None:
        if strike and os.getpid() != _launcher:
            strike.strike(place, done[0])

    class Striking(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            at("update")
            super().step(closure)
            at("updated")
            done[0] += 1

    Striking.__name__ = "AdamW"

    def loss(output: Any, batch: Any) -> Any:
        if not torch.is_grad_enabled():
            return px.cross_entropy(output, batch["y"])
        at("forward")
        output.register_hook(lambda grad: at("backward"))
        return px.cross_entropy(output, batch["y"])

    return job(
        model=model, loss=loss, optimizer=lambda params: Striking(params, lr=1e-2), epochs=None, steps=STEPS, **how
    )


@cache
def undisturbed(plan: str, model: Callable[[], nn.Module] = Net) -> px.Run:
    run = spec(plan, Path(mkdtemp(prefix="undisturbed-")) / "run", checkpoint_every=1, keep=STEPS)
    return px.fit(job_of(model=model), run=run)


def held(path: Path) -> dict[str, torch.Tensor]:
    found = {name: one for file in path.glob("*.safetensors") for name, one in load_file(file).items()}
    state = read_state(path)
    numbers = {name: state[name] for name in ("step", "samples", "divisor")} | (state["loss_scale"] or {})
    return found | {name: torch.tensor(float(one)) for name, one in numbers.items()}


def is_as_undisturbed(run: RunSpec, done: px.Run, model: Callable[[], nn.Module] = Net) -> None:
    """Every checkpoint holds to the last bit what the run without the loss had then; steps and samples are there once.

    What a run computes after a restart may differ in its last bits with more than two ranks: DistributedDataParallel
    arranges gradients otherwise in a process's first step, and their sums are then added up in another order.
    """
    other = undisturbed(str(run.plan), model)
    assert done.losses == pytest.approx(other.losses, rel=0 if run.plan.dp == 2 else 1e-5)
    assert [event["step"] for event in events(run.folder, "step")] == list(range(STEPS))  # each once, in order
    survivors = [path for path in (run.folder / "checkpoints").iterdir() if read_state(path)["survivor"] is not None]
    last = [run.folder / "checkpoints" / f"step-{STEPS:08d}"] if run.plan.dp == 2 else []
    for path in (*survivors, *last):
        mine, theirs = held(path), held(other.folder / "checkpoints" / path.name)
        assert mine.keys() == theirs.keys()
        assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    assert audit(run.folder / "ledger", length=LENGTH, batch=BATCH, drop_last=False) == []


PLACES: list[Any] = [
    ("dp=2", Net, 1, 4, "backward"),
    ("dp=2", WithStatistics, 0, 3, "forward"),
    ("dp=2 precision=fp16", Net, 1, 3, "update"),
    *longer(
        *(
            (plan, Net, rank, step, place)
            for plan in ("dp=2", "dp=3")
            for rank, step, place in ((0, 1, "forward"), (1, 3, "forward"), (0, 3, "update"), (1, 3, "update"))
        ),
        *(("dp=2", WithStatistics, rank, 3, place) for rank in (0, 1) for place in ("backward", "update")),
        ("dp=2 precision=fp16", Net, 1, 3, "forward"),
        ("dp=3", Net, 0, 5, "updated"),
    ),
]


@pytest.mark.parametrize(("plan", "model", "rank", "step", "place"), PLACES)
def test_no_step_is_lost(plan: str, model: type[nn.Module], rank: int, step: int, place: str, tmp_path: Path) -> None:
    run = spec(plan, tmp_path / "run", checkpoint_every=0)
    strike = Strike(rank=rank, step=step, place=place, once=tmp_path / "struck")
    done = px.fit(job_of(strike, model=model), run=run)
    first = step + place.startswith("update")  # then all have had their part in the step, and the others finished it
    assert [event["first_step"] for event in events(run.folder, "start")] == [0, first]
    (restart,) = events(run.folder, "restart")
    assert restart["again"] == 0
    assert f"which was at step {first}; no step is lost" in restart["source"]
    assert not events(run.folder, "warning")
    is_as_undisturbed(run, done, model)


@pytest.mark.parametrize("milliseconds", [4, *longer(0, 1, 2, 8, 16)])
def test_no_step_is_lost_in_the_middle_of_an_exchange(milliseconds: int, tmp_path: Path) -> None:
    begun: list[int] = []

    def later() -> None:
        begun.append(1)
        threading.Timer(milliseconds / 1000, be_killed).start()

    run = spec("dp=2", tmp_path / "run", checkpoint_every=0)
    strike = Strike(rank=1, step=3, place="backward", once=tmp_path / "struck", how=later)
    given = job_of(strike, model=Wide)

    def loss(output: Any, batch: Any) -> Any:
        begun.extend(begun[:1])
        if len(begun) > 3:  # the timer is late, and the run's end near
            time.sleep(20)
        return given.loss(output, batch)

    done = px.fit(replace(given, loss=loss), run=run)
    (restart,) = events(run.folder, "restart")
    assert restart["again"] == 0
    assert "no step is lost" in restart["source"]
    is_as_undisturbed(run, done, Wide)


def test_survivors_that_find_out_late_are_waited_for(tmp_path: Path) -> None:
    strike = Strike(rank=1, step=3, place="forward", once=tmp_path / "struck")
    given = job_of(strike)

    def slow(output: Any, batch: Any) -> Any:
        if strike.once.exists() and not (tmp_path / "late").exists():
            (tmp_path / "late").touch()
            time.sleep(2.5)
        return given.loss(output, batch)

    run = spec("dp=2", tmp_path / "run", checkpoint_every=0)
    done = px.fit(replace(given, loss=slow), run=run)
    assert "no step is lost" in events(run.folder, "restart")[0]["source"]
    is_as_undisturbed(run, done)


@pytest.mark.parametrize("how", ["half of the update", "the model itself"])
def test_what_is_of_no_step_is_not_saved(how: str, tmp_path: Path) -> None:
    """A survivor that cannot go back to the last finished step leaves it to the disk."""
    once = tmp_path / "struck"

    class Changing(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if how == "the model itself" and torch.is_grad_enabled() and os.getpid() != _launcher:
                with torch.no_grad():
                    self.head.weight.mul_(0.999)
            return super().forward(x)

    def half(params: Any) -> torch.optim.Optimizer:
        made, step, steps = torch.optim.AdamW(params, lr=1e-2), torch.optim.AdamW.step, [0]

        def stepped(self: torch.optim.AdamW, closure: Any = None) -> Any:
            steps[0] += 1
            mine = tmp_path / f"struck-{dist.get_rank()}"
            if steps[0] != 4 or mine.exists():
                return step(self, closure)
            wait_until(saved.exists, 10)
            mine.touch()
            self.state[self.param_groups[0]["params"][0]]["exp_avg"].add_(1.0)
            if dist.get_rank() == 0:
                wait_until((tmp_path / "struck-1").exists, 10)  # else the other would strike in the next start
                raise ConnectionResetError("Connection reset by peer")
            return be_killed_after(tmp_path / "struck-0")

        made.step = MethodType(stepped, made)
        return made

    saved = tmp_path / "run" / "checkpoints" / "step-00000002"
    place = "forward" if how == "the model itself" else "never"
    strike = Strike(rank=1, step=3, place=place, once=once, how=lambda: be_killed_after(saved))
    given = job_of(strike, model=Changing)
    run = spec("dp=2", tmp_path / "run", checkpoint_every=2, drift="off")
    px.fit(given if place == "forward" else replace(given, optimizer=half), run=run)
    (restart,) = events(run.folder, "restart")
    assert restart["source"] == "from the checkpoint of step 2; 1 step is computed again"
    assert [event["first_step"] for event in events(run.folder, "start")] == [0, 2]


@pytest.mark.parametrize(
    ("plan", "how"), [("dp=2", {"grace": 0.0}), *longer(("fsdp=2", {}), ("dp=2 sync=local every=2", {}))]
)
def test_what_no_survivor_holds_comes_from_the_disk(plan: str, how: dict[str, Any], tmp_path: Path) -> None:
    run = spec(plan, tmp_path / "run", checkpoint_every=2, **how)
    saved = run.folder / "checkpoints" / "step-00000002"
    done = px.fit(striking(lambda: be_killed_after(saved), at=3, once=tmp_path / "struck"), run=run)
    (restart,) = events(run.folder, "restart")
    assert restart["source"] == "from the checkpoint of step 2; 1 step is computed again"
    assert restart["again"] == 1
    if "local" not in plan:  # there each save averages
        assert done.losses == undisturbed(plan).losses


def test_a_failure_of_the_jobs_own_code_leaves_what_was_trained(tmp_path: Path) -> None:
    def fails() -> None:
        raise ValueError("the job's own")

    run = spec("dp=2", tmp_path / "run", checkpoint_every=0)
    strike = Strike(rank=1, step=3, place="forward", once=tmp_path / "struck", how=fails)
    with pytest.raises(WorkerError, match="the job's own"):
        px.fit(job_of(strike), run=run)
    assert [event["step"] for event in events(run.folder, "checkpoint")] == [3]
    assert not events(run.folder, "restart")
    assert audit(run.folder / "ledger", length=LENGTH, batch=BATCH, drop_last=False) == []
    is_as_undisturbed(run, px.fit(job_of(strike), run=replace(run, resume=True)))


def test_a_worker_that_is_lost_in_the_middle_of_a_save(tmp_path: Path) -> None:
    """Survivors wait for its part in the next save, and are told that it does not come."""
    run = spec("dp=2", tmp_path / "run", checkpoint_every=1)
    once = tmp_path / "struck"

    from phalanx.checkpoint.writing import FileContent

    written = FileContent.write

    def write(self: FileContent, path: Path) -> Any:
        if path.parent.name == ".step-00000003.tmp" and dist.get_rank() == 1 and not once.exists():
            once.touch()
            be_killed()
        return written(self, path)

    patch = pytest.MonkeyPatch()
    patch.setattr(FileContent, "write", write)
    try:
        done = px.fit(job_of(), run=run)
    finally:
        patch.undo()
    (restart,) = events(run.folder, "restart")
    assert "no step is lost" in restart["source"]
    is_as_undisturbed(run, done)
    assert not list((run.folder / "checkpoints").glob(".step*"))
