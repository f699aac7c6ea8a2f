"""Whole runs: what a run folder holds, resuming under any plan, evaluation, every way in."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small import BATCH, LENGTH, fit, job, table

import phalanx as px
from phalanx.data import audit, host_ledger, read_ledger
from phalanx.events import faults


def test_a_run_folder_holds_what_happened(tmp_path: Path) -> None:
    run = fit("dp=2", tmp_path / "run", checkpoint_every=3, evaluate=lambda: table(50, seed=1), evaluate_every=4)
    events = list(run.events())
    assert [fault for event in events for fault in faults(event)] == []
    assert [event["step"] for event in run.events("step")] == list(range(8))
    assert [event["samples"] for event in run.events("step")] == [32, 32, 32, 7] * 2
    assert [event["step"] for event in run.events("checkpoint")] == [3, 6, 8]
    assert [event["step"] for event in run.events("evaluate")] == [4, 8]
    assert [event["rank"] for event in run.events("memory")] == [0, 1]
    assert events[0]["event"] == "start"
    assert [event["event"] for event in events if event["event"] != "forecast"][-1] == "end"  # it comes when it comes
    assert str(run.plan) == "dp=2"
    assert audit(run.folder / "ledger", length=LENGTH, batch=BATCH, drop_last=False) == []
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == ["step-00000006", "step-00000008"]


@pytest.mark.parametrize("plan", ["dp=2 fsdp=2", "dp=2 sync=local every=2"])
def test_the_ranks_of_a_host_share_a_ledger_where_they_are_many(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_ledger, "MOST_FILES", 1)
    run = fit(plan, tmp_path / "run", epochs=None, steps=5)
    run = fit(plan, tmp_path / "run", resume=True)
    names = sorted(path.name for path in (run.folder / "ledger").iterdir())
    assert names == ["00000000-host00000.bin", "00000005-host00000.bin"]
    assert audit(run.folder / "ledger", length=LENGTH, batch=BATCH, drop_last=False) == []


@pytest.fixture(scope="module")
def halfway(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A run stopped after 5 of 8 steps, one into the second epoch, and the losses of one that was not."""
    folder = tmp_path_factory.mktemp("half")
    whole = fit("dp=2", folder / "whole", epochs=2)
    fit("dp=2", folder / "half", epochs=None, steps=5)
    return folder / "half", whole.losses


@pytest.mark.parametrize(
    "plan",
    ["dp=2", "single", "dp=3", "threads=2", "fsdp=2", "fsdp=3 zero=1", "fsdp=2 zero=2", "dp=2 offload=optimizer"],
)
def test_resume_goes_on_under_any_plan(plan: str, halfway: tuple[Path, list[float]], tmp_path: Path) -> None:
    folder, losses = halfway
    shutil.copytree(folder, tmp_path / "run")
    run = fit(plan, tmp_path / "run", resume=True)
    if plan == "dp=2":
        assert run.losses == losses
    else:
        assert run.losses == pytest.approx(losses, rel=1e-6)
    assert audit(run.folder / "ledger", length=LENGTH, batch=BATCH, drop_last=False) == []
    assert len(read_ledger(run.folder / "ledger")) == 8
    assert next(run.events("resume"))["step"] == 5


@pytest.mark.parametrize("plan", ["single", "dp=2 server=1"])
def test_a_length_that_moves_the_schedule_is_said(plan: str, tmp_path: Path) -> None:
    decays = px.Schedule(decay="linear")
    fit(plan, tmp_path / "run", epochs=None, steps=4, checkpoint_every=2, schedule=decays)
    longer = fit(plan, tmp_path / "run", epochs=None, steps=8, resume=True, schedule=decays)
    said = [note for note in list(longer.events("start"))[-1]["notes"] if "length of the run" in note]
    assert len(said) == 1
    assert "4 steps and is 8 now: step 4 is taken at 0.5 of the optimizer's rate, where 0 was to be" in said[0]
    assert "px.Schedule(..., total_steps=4)" in said[0]
    again = fit(plan, tmp_path / "run", epochs=None, steps=10, resume=True, schedule=replace(decays, total_steps=8))
    assert not any("length of the run" in note for note in list(again.events("start"))[-1]["notes"])


@pytest.mark.parametrize("plan", ["single", "dp=2 server=1"])
def test_a_run_of_which_no_step_is_left_says_so(plan: str, tmp_path: Path) -> None:
    fit(plan, tmp_path / "run", epochs=None, steps=6)
    run = fit(plan, tmp_path / "run", resume=True, epochs=None, steps=3)
    said = [event["message"] for event in run.events("warning") if "no step is left" in event["message"]]
    assert said == ["no step is left: the run has taken 6, and its job has 3. More `steps` or `epochs` let it go on."]
    assert len(run.losses) == 6


def test_fp16_resumes_with_its_loss_scale(tmp_path: Path) -> None:
    whole = fit("precision=fp16", tmp_path / "whole")
    fit("precision=fp16", tmp_path / "half", epochs=None, steps=5)
    assert fit("precision=fp16", tmp_path / "half", resume=True).losses == whole.losses


@pytest.mark.parametrize("plan", ["single micro=5", "dp=3", "fsdp=4", "threads=3", "fsdp=2 zero=2"])
def test_evaluation_counts_each_sample_once(plan: str, tmp_path: Path) -> None:
    seen = fit(
        plan,
        tmp_path / "run",
        epochs=None,
        steps=1,
        evaluate=lambda: table(35, seed=1),  # a last batch of 3: fewer samples than ranks
        metrics=lambda output, batch: {"ones": px.Loss(torch.ones(len(output)).sum(), 1)},
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
    ).evaluation
    assert seen is not None
    model = _initial()
    data = table(35, seed=1).__getitems__(list(range(35)))
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(data["x"]), data["y"])
    assert seen["samples"] == 35
    assert seen["loss"] == pytest.approx(float(expected), rel=1e-6)


def _initial() -> torch.nn.Module:
    from phalanx.train.build_model import build_model

    return build_model(job())


def test_the_device_count_never_changes_the_learning_rate(tmp_path: Path) -> None:
    schedule = px.Schedule(decay="cosine", warmup_samples=96)
    rates = [
        [e["lr"] for e in fit(plan, tmp_path / plan, schedule=schedule).events("step")] for plan in ("single", "dp=3")
    ]
    assert rates[0] == rates[1]
    assert rates[0][:3] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2])


def test_clipping_is_by_the_global_norm(tmp_path: Path) -> None:
    norms = [
        [event["grad_norm"] for event in fit(plan, tmp_path / plan, clip=0.05).events("step")]
        for plan in ("single", "fsdp=3", "fsdp=2 zero=2", "dp=2 fsdp=2 zero=1")
    ]
    for other in norms[1:]:
        assert other == pytest.approx(norms[0], rel=1e-5)
    assert min(norms[0]) > 0.05


def test_build_leaves_the_loop_to_the_user(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="phalanx"):
        step, loader = px.build(job(), "threads=2 micro=64")
    assert [one.getMessage() for one in caplog.records] == [
        f"micro=64 splits nothing: a rank's share of the global batch of {BATCH} is {BATCH // 2} samples."
    ]
    losses = [step(batch).loss for batch in loader]
    assert len(losses) == 8
    assert losses == pytest.approx(fit("single", "one").losses, rel=1e-6)
