"""Loops of one's own with a run: saved, stopped and gone on with under another plan, evaluated and recorded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import torchrun
from small import BATCH, LENGTH, Net, batches_of, fit, job, plain_losses, table
from torch import nn

import phalanx as px
from law_rows import longer
from phalanx.config import RunSpec
from phalanx.errors import RunError, SpecError
from phalanx.report.samples_seen import samples_seen

STEPS, STOPPED = 8, 5  # two epochs of 103 samples; in the middle of the second
EVALUATION = 35
SCRIPT = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
import phalanx as px
from small import job, table

torch.set_num_threads(1)
plan, stop = sys.argv[1], int(sys.argv[2])
step, loader = px.build(
    job(evaluate=lambda: table({EVALUATION}, seed=1), shuffle=False), plan, run="run", resume="auto", checkpoint_every=2
)
losses = {{}}
for batch in loader:
    losses[batch.step] = step(batch).loss
    if step.taken == stop:
        step.save()
        break
evaluation = step.evaluate()
if step.first:
    print(json.dumps({{"losses": losses, "evaluation": evaluation.loss, "samples": evaluation.samples}}))
"""


def ran(plan: str, stop: int, folder: Path) -> dict[str, Any]:
    """What the script says that is stopped after so many steps."""
    (folder / "script.py").write_text(SCRIPT)
    done = torchrun(folder, plan, f"{stop}", ranks=px.Plan.parse(plan).world_size)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("before", "after"),
    [("single", "threads=2 micro=8"), *longer(("dp=2", "single"), ("dp=2", "fsdp=2"))],
)
def test_a_loop_goes_on_under_another_plan(before: str, after: str, plain: list[float], tmp_path: Path) -> None:
    first, second = ran(before, STOPPED, tmp_path), ran(after, -1, tmp_path)
    assert list(first["losses"]) == [f"{step}" for step in range(STOPPED)]
    assert list(second["losses"]) == [f"{step}" for step in range(STOPPED, STEPS)]
    losses = [*first["losses"].values(), *second["losses"].values()]
    run = px.load(tmp_path / "run")
    assert losses == pytest.approx(plain, rel=1e-5)
    assert run.losses == pytest.approx(plain, rel=1e-5)
    assert second["samples"] == EVALUATION
    assert second["evaluation"] == pytest.approx(evaluated(run.state_dict()), rel=1e-5)
    assert [event["step"] for event in run.events("evaluate")] == [STOPPED, STEPS]
    assert len(list(run.events("end"))) == 1
    assert str(run.plan) == after
    assert run.checkpoint().name == f"step-{STEPS:08d}"
    assert samples_seen(tmp_path / "run").once


def taken(folder: str, stop: int | None = None, **how: Any) -> list[float]:
    """Losses of a loop on one device that is left after so many steps, or saved and at its end."""
    given = {"plan": "single", "checkpoint_every": 0, **how}
    of_job = {name: given.pop(name) for name in list(given) if name not in ("plan", "resume", "checkpoint_every")}
    step, loader = px.build(job(**of_job), given.pop("plan"), run=folder, **given)
    losses = list[float]()
    for batch in loader:
        losses.append(step(batch).loss)
        if step.taken == stop:
            break
    step.close()
    return losses


@pytest.fixture(scope="module")
def plain() -> list[float]:
    steps = [slice(start, start + BATCH) for start in range(0, LENGTH, BATCH)]
    return plain_losses(batches_of(table().columns, steps * 2))


def evaluated(values: dict[str, torch.Tensor]) -> float:
    """Loss of plain PyTorch over the evaluation data."""
    model, held_out = Net(), table(EVALUATION, seed=1).columns
    model.load_state_dict(values)
    with torch.no_grad():
        return nn.functional.cross_entropy(model(held_out["x"]), held_out["y"]).item()


def checkpoints(folder: str) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in Path(folder, "checkpoints").iterdir())


def test_it_saves_by_itself() -> None:
    taken("run", checkpoint_every=3)
    assert checkpoints("run") == [6, 8]
    taken("by-time", checkpoint_every="0.001s")
    assert checkpoints("by-time") == [7, 8]


def test_what_fit_begins_a_loop_goes_on_with() -> None:
    whole = fit("single", "whole").losses
    fit("dp=2", "run", epochs=1)
    spec = RunSpec(job="small", plan=px.Plan(), folder=Path("run"), resume=True, checkpoint_every=0)
    step, loader = px.build(job(), run=spec)
    assert [step(batch).loss for batch in loader] == pytest.approx(whole[4:], rel=1e-5)
    assert len(px.load("run").losses) == STEPS


def test_fit_takes_a_run_as_build_does() -> None:
    losses = taken("loop")
    run = px.fit(job(), "single", run="whole")
    assert (run.folder, run.losses) == (Path("whole"), pytest.approx(losses, rel=1e-6))
    assert px.fit(job(), "single", run="whole", folder="other").folder == Path("other")


def test_a_cell_that_is_run_again_lets_go_of_the_folder() -> None:
    for _ in range(2):
        step, loader = px.build(job(), "single", run="run", resume="auto", checkpoint_every=1)
        for batch in loader:
            step(batch)
            if step.taken % 3 == 0:
                break
    assert step.taken == 6
    step.close()
    assert not px.load("run").running


class TestRefusals:
    def test_another_job(self) -> None:
        how = {"batch": 16}
        taken("run", 4, checkpoint_every=2)
        told = []
        for go_on in (lambda: taken("run", resume=True, **how), lambda: fitted(**how)):
            with pytest.raises(SpecError, match="another job") as refused:
                go_on()
            told.append(str(refused.value))
        assert told[0] == told[1]

    def test_a_folder_that_holds_a_run(self) -> None:
        taken("run", 4, checkpoint_every=2)
        with pytest.raises(SpecError, match="resume=True"):
            taken("run")

    @pytest.mark.parametrize(
        ("how", "where"), [({"resume": True}, "resume"), ({"checkpoint_every": 5}, "checkpoint_every")]
    )
    def test_settings_without_a_run(self, how: dict[str, Any], where: str) -> None:
        with pytest.raises(SpecError) as refused:
            px.build(job(), "single", **how)
        assert [one.where for one in refused.value.problems] == [where]

    @pytest.mark.parametrize(
        ("how", "where"), [({"devices": "1:2"}, "run.devices"), ({"on_nonfinite": "rollback"}, "run.on_nonfinite")]
    )
    def test_settings_that_need_a_launcher(self, how: dict[str, Any], where: str) -> None:
        spec = RunSpec(job="small", plan=px.Plan(), folder=Path("run"), **how)
        with pytest.raises(SpecError) as refused:
            px.build(job(), run=spec)
        assert [one.where for one in refused.value.problems] == [where]

    def test_what_only_a_run_has(self) -> None:
        step, _ = px.build(job(), "single")
        with pytest.raises(SpecError, match="run folder"):
            step.save()
        with pytest.raises(SpecError, match="evaluate"):
            step.evaluate()


@pytest.mark.parametrize(("name", "run"), [("single", None), ("threads=2 micro=8", "run")])
class TestOneForIsTheWholeTraining:
    def test_the_loader_again_has_nothing_left(self, name: str, run: str | None, plain: list[float]) -> None:
        step, loader = px.build(job(shuffle=False), name, run=run)
        losses = {batch.step: step(batch).loss for _ in range(3) for batch in loader}
        assert step.taken == len(losses) == STEPS
        assert [losses[at] for at in range(STEPS)] == pytest.approx(plain, rel=1e-5)
        step.close()

    def test_a_loop_that_was_left_goes_on(self, name: str, run: str | None, plain: list[float]) -> None:
        step, loader = px.build(job(shuffle=False), name, run=run)
        losses = list[float]()
        for stop in (0, 3, 5, STEPS):
            for batch in loader:
                if step.taken == stop:
                    break
                losses.append(step(batch).loss)
        assert losses == pytest.approx(plain, rel=1e-5)
        step.close()

    @pytest.mark.parametrize("skipped", [0, STEPS - 1])
    def test_a_batch_that_is_left_out(self, name: str, run: str | None, skipped: int) -> None:
        step, loader = px.build(job(shuffle=False), name, run=run)
        with pytest.raises(RunError, match="each batch has one step"):
            list(map(step, (batch for batch in loader if batch.step != skipped)))
        step.close()

    def test_a_batch_that_has_a_second_step(self, name: str, run: str | None) -> None:
        step, loader = px.build(job(shuffle=False), name, run=run)
        with pytest.raises(RunError, match="each batch has one step"):
            [step(batch) for batch in loader for _ in range(2)]
        step.close()


def fitted(**how: Any) -> px.Run:
    return px.fit(job(**how), run=RunSpec(job="job", plan=px.Plan(), folder=Path("run"), resume=True, forecast="none"))


def test_public_names() -> None:
    step, loader = px.build(job(), "single")
    assert isinstance(step.model, Net)
    assert isinstance(step.optimizer, torch.optim.AdamW)
    weight = next(step.model.parameters())
    weight.grad = torch.ones_like(weight)
    step.zero_grad()
    assert weight.grad is None
    assert (loader.length, loader.total_steps, loader.steps_per_epoch) == (LENGTH, STEPS, 4)


def test_best_and_early_end() -> None:
    best = px.Best("loss", patience=2)
    how = {"evaluate": lambda: table(EVALUATION, seed=1), "evaluate_every": 1, "best": best, "epochs": 50}
    losses = taken("run", **how)
    whole = px.fit(job(**how), run=RunSpec(job="j", plan=px.Plan(), folder=Path("fit"), forecast="none"))
    assert losses == whole.losses
    assert px.load("run").best == {
        **(whole.best or {}),
        **{k: (px.load("run").best or {})[k] for k in ("time", "seconds")},
    }
    assert len(list(px.load("run").events("ended_early"))) == 1


STOPPING = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import phalanx as px
from small import job
step, loader = px.build(job(), "single", run="run", resume="auto")
for batch in loader:
    step(batch)
    if step.taken == 3:
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
print("at its end")
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), *longer(("SIGINT", -signal.SIGINT), ("SIGUSR1", 75))])
def test_a_signal_saves_and_stops(name: str, code: int) -> None:
    command = [sys.executable, "-W", "ignore", "-c", STOPPING, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.returncode == code, done.stderr
    assert "at its end" not in done.stdout
    assert checkpoints("run") == [4]
    (stopped,) = px.load("run").events("stopped")
    assert (stopped["step"], stopped["signal"]) == (4, name)
    assert len(taken("run", resume=True)) == STEPS - 4


def test_what_only_a_run_heeds_is_said_without_one(caplog: pytest.LogCaptureFixture) -> None:
    how: dict[str, Any] = {"evaluate": lambda: table(8), "evaluate_every": 2, "callbacks": {"step": print}}
    px.build(job(**how))
    assert "evaluate_every and callbacks" in caplog.text
