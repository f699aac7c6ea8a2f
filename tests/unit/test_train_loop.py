"""The training loop with a stepper that only counts; random streams; what comes back from a checkpoint."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small import Net, job

import phalanx as px
from chaos.run_equality import read_ledger
from phalanx.checkpoint import BackgroundSaver, Saving
from phalanx.comm import Place
from phalanx.data import Ledger, MicroBatch, StepBatch
from phalanx.errors import CheckpointError
from phalanx.events import RunLog
from phalanx.events.schema import faults
from phalanx.train.assembly import Assembly, build
from phalanx.train.build_model import build_model
from phalanx.train.evaluate import Evaluation
from phalanx.train.interruptions import Interruptions, no_signal
from phalanx.train.loop import Stepper, StepsLostError, TrainingLoop
from phalanx.train.lr_schedule import RunStart
from phalanx.train.metrics import Metrics
from phalanx.train.observer import Observer
from phalanx.train.run_recorder import Lap, RunRecorder
from phalanx.train.state import restore, to_save

TOTAL = 10


class Counting(Stepper):
    """Takes ten steps of one sample; loses those after ``back`` once, when it is to save at step ``strikes``."""

    def __init__(self, folder: Path, strikes: int = -1, back: int = 0) -> None:
        self._folder, self._strikes, self._back, self._step = folder, strikes, back, 0
        self.moments: list[tuple[str, int]] = []
        self.tried = 0  # how often one batch was evaluated

    @property
    def taken(self) -> int:
        return self._step

    @property
    def ended(self) -> bool:
        return self._step == TOTAL

    @property
    def samples(self) -> int:
        return self._step

    def steps(self, pause: int | None, interruptions: Interruptions) -> Iterator[tuple[StepBatch, Metrics, Lap | None]]:
        while self._step < min(TOTAL, pause or TOTAL):
            batch = batch_of(self._step)
            totals = float(self._step), 1.0
            self._step += 1
            yield (
                batch,
                Metrics(step=batch.step, epoch=0, samples=1, lr=0.1, skipped=False, _totals=totals, _norm=None),
                (0.1, 0.2),
            )
            if interruptions.reached(self._step):
                return

    def evaluate(self, interruptions: Interruptions, *, batches: int | None = None) -> Evaluation:
        if batches is not None:
            self.tried += 1
            return Evaluation(loss=0.5, samples=1, metrics={}, seconds=0.0)
        self.moments.append(("evaluate", self._step))
        return Evaluation(loss=0.5, samples=3, metrics={}, seconds=0.0)

    def save(self, folder: Path, *, keep: int, keep_every: int | None) -> Saving:
        self.moments.append(("save", self._step))
        if self._step == self._strikes:
            self._strikes = -1
            raise StepsLostError("a loss is not finite")
        path = folder / f"step-{self._step}"
        path.mkdir(parents=True)
        return Saving.done(self._step, path, time.perf_counter())

    def recover(self, lost: StepsLostError) -> None:
        self.moments.append(("recover", 1))
        self._step = self._back

    def finish(self) -> list[tuple[str, dict[str, Any]]]:
        return [("memory", {"rank": 0, "peak_bytes": 1})]


def looped(
    stepper: Counting,
    folder: Path,
    *,
    evaluate_every: int,
    save_every: int | str,
    asked: Callable[[], int] = no_signal,
    **how: Any,
) -> dict[str, Any]:
    run = px.RunSpec(job="small", plan=px.Plan(), folder=folder, checkpoint_every=save_every, **how)
    folder.mkdir(exist_ok=True)
    given = job(evaluate_every=evaluate_every, evaluate=list)
    with RunRecorder(run, ledger=None, writes=True, total_steps=TOTAL) as recorder:
        return TrainingLoop(given, run, stepper, recorder, Observer(), Interruptions(run, asked)).run()


def batch_of(step: int) -> StepBatch:
    micro = MicroBatch(batch=None, ids=(step,), samples=1)
    return StepBatch(step=step, epoch=0, samples=1, parts=((micro,),))


def test_a_ledger_that_goes_back_notes_each_step_once(tmp_path: Path) -> None:
    def segment() -> Ledger:
        return Ledger(tmp_path / "ledger", rank=0, first_step=0)

    run = px.RunSpec(job="small", plan=px.Plan(), folder=tmp_path)
    metrics = Metrics(step=0, epoch=0, samples=1, lr=0.1, skipped=False, _totals=(1.0, 1.0), _norm=None)
    with RunRecorder(run, ledger=segment(), writes=False, total_steps=TOTAL) as recorder:
        for step in range(3):
            recorder.stepped(batch_of(step), metrics, None)
        recorder.go_back(segment)
        for step in range(3):
            recorder.stepped(batch_of(step), metrics, None)
    assert [(step, list(ids)) for step, (_, ids) in read_ledger(tmp_path / "ledger").items()] == [
        (0, [0]),
        (1, [1]),
        (2, [2]),
    ]


def test_it_pauses_where_something_is_due_and_does_all_once_at_the_end(tmp_path: Path) -> None:
    stepper = Counting(tmp_path)
    summary = looped(stepper, tmp_path, evaluate_every=4, save_every=5, log_every=3)
    expected = [("evaluate", 4), ("save", 5), ("evaluate", 8), ("save", 10), ("evaluate", 10)]
    assert stepper.moments == expected
    assert {key: summary[key] for key in ("step", "samples", "loss")} == {"step": 10, "samples": 10, "loss": 9.0}
    assert summary["evaluation"] == {"loss": 0.5, "samples": 3, "metrics": {}}
    names = [(event["event"], event.get("step")) for event in RunLog(tmp_path).events]
    assert [step for name, step in names if name == "step"] == [0, 3, 6, 9]
    assert [name for name, _ in names][-3:] == ["timing", "memory", "end"]


def test_after_steps_were_lost_what_they_led_to_is_done_again(tmp_path: Path) -> None:
    stepper = Counting(tmp_path, strikes=8, back=6)
    looped(stepper, tmp_path, evaluate_every=4, save_every=4)
    expected = [("save", 4), ("evaluate", 4), ("save", 8), ("recover", 1)]
    expected += [("save", 8), ("evaluate", 8), ("save", 10), ("evaluate", 10)]
    assert stepper.moments == expected


def test_a_request_to_stop_ends_it_after_the_step_that_is_under_way_with_a_checkpoint(tmp_path: Path) -> None:
    stepper = Counting(tmp_path)
    how = {"evaluate_every": 4, "save_every": 0}
    summary = looped(stepper, tmp_path, asked=lambda: signal.SIGTERM if stepper.taken == 4 else 0, **how)
    assert stepper.moments == [("save", 4)]
    assert (summary["step"], summary["stopped"]) == (4, signal.SIGTERM)
    events = RunLog(tmp_path).events
    assert [(one["step"], one["signal"]) for one in events if one["event"] == "stopped"] == [(4, "SIGTERM")]
    assert [fault for event in events if event["event"] == "stopped" for fault in faults(event)] == []


def test_by_the_clock_it_saves_when_the_time_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = Counting(tmp_path)
    monkeypatch.setattr("phalanx.train.interruptions.time.monotonic", lambda: 20.0 * stepper.taken)
    looped(stepper, tmp_path, evaluate_every=0, save_every="1m")
    assert stepper.moments == [("save", 3), ("save", 6), ("save", 9), ("save", 10), ("evaluate", 10)]


def test_neighbouring_seeds_give_other_initial_values() -> None:
    def first(seed: int) -> float:
        return float(next(build_model(job(seed=seed)).parameters())[0, 0].detach())

    assert len({first(seed) for seed in range(6)}) == 6
    assert first(3) == first(3)


def saved_and_restored(folder: Path, before: dict[str, Any], after: dict[str, Any]) -> Assembly:
    """Two steps with AdamW of ``before``, restored into a job with AdamW of ``after``."""
    first, second = (
        job(optimizer=lambda params, options=options: torch.optim.AdamW(params, **options))
        for options in (before, after)
    )
    assembly = build(first, px.Plan(), Place(), torch.device("cpu"))
    batches = iter(assembly.loader)
    for _ in range(2):
        assembly.step(next(batches))
    path = BackgroundSaver().save(to_save(folder, first, assembly, keep=1), at_once=True).path
    resumed = build(second, px.Plan(), Place(), torch.device("cpu"), start=RunStart(resumes=True, step=2))
    restore(path, second, resumed)
    for then, now in zip(assembly.optimizer.state.values(), resumed.optimizer.state.values(), strict=True):
        assert all(torch.equal(then[key], now[key]) for key in ("step", "exp_avg", "exp_avg_sq"))
    return resumed


@pytest.mark.parametrize("form", [float, torch.tensor])
def test_hyper_parameters_are_the_jobs_as_it_is_now(tmp_path: Path, form: Any) -> None:
    before = {"lr": form(0.5), "weight_decay": 0.3, "betas": (0.5, 0.6)}
    after = {"lr": form(0.125), "weight_decay": 0.1, "betas": (0.9, 0.99)}
    resumed = saved_and_restored(tmp_path, before, after)
    (group,) = resumed.optimizer.param_groups
    assert (float(group["lr"]), group["weight_decay"], group["betas"]) == (0.125, 0.1, (0.9, 0.99))
    assert group["lr"] is after["lr"] or not isinstance(group["lr"], torch.Tensor)
    assert resumed.step(next(iter(resumed.loader))).lr == 0.125


class Masked(Net):
    """With a buffer of minus infinity, as masks are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((2,), float("-inf")))


def test_a_mask_may_be_infinite_and_a_parameter_may_not(tmp_path: Path) -> None:
    masked = job(model=Masked)
    assembly = build(masked, px.Plan(), Place(), torch.device("cpu"))
    assembly.step(next(iter(assembly.loader)))
    BackgroundSaver().save(to_save(tmp_path, masked, assembly, keep=1), at_once=True)
    with torch.no_grad():
        assembly.layout.parameters["head.bias"][0] = float("inf")
    with pytest.raises(CheckpointError, match=r"model\.head\.bias is not finite \(1 infinite"):
        BackgroundSaver().save(to_save(tmp_path / "other", masked, assembly, keep=1), at_once=True)
