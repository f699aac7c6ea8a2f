"""A scheduler of torch's beside the optimizer: the rates of a plain loop under every plan, also where a run goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from small import BATCH, Net, fit, job, table
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CyclicLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import phalanx as px
from phalanx.errors import PhalanxError, RefusedError, SpecError

PLANS = ("single", "dp=2", "fsdp=2 zero=3 micro=8", "tp=2", "pp=2 micro=8", "dp=2 sync=local every=2")
STEPS = 8


def adamw(schedule: Callable[[Any], LRScheduler], **how: Any) -> Callable[[Any], Any]:
    def optimizer(params: Any) -> Any:
        made = AdamW(params, lr=1e-2, **how)
        return made, schedule(made)

    return optimizer


def sequential(optimizer: Any) -> LRScheduler:
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.25, total_iters=3), CosineAnnealingLR(optimizer, 6)], [3])


SCHEDULERS: dict[str, Callable[[Any], LRScheduler]] = {
    "sequential": sequential,
    "milestones": lambda one: MultiStepLR(one, [2, 5], 0.3),
    "one cycle": lambda one: OneCycleLR(one, max_lr=0.1, total_steps=STEPS),  # moves betas as well
    "cyclic": lambda one: CyclicLR(one, 1e-3, 1e-2, step_size_up=3, cycle_momentum=False),
}


class Pair(nn.Module):
    """Two layers that can share out their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(9, 16), nn.Linear(16, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def pairs() -> nn.Module:
    return nn.Sequential(Pair(), Pair(), nn.Linear(9, 5))


def plain(schedule: Callable[[Any], LRScheduler], steps: int = STEPS) -> list[tuple[float, Any]]:
    """Rate and betas of each step in a loop as torch's documentation has it."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = AdamW([weight], lr=1e-2)
    scheduler, found = schedule(optimizer), list[tuple[float, Any]]()
    for _ in range(steps):
        (group,) = optimizer.param_groups
        found.append((group["lr"], group["betas"]))
        weight.grad = torch.ones(1)
        optimizer.step()
        scheduler.step()
    return found


def rates(run: px.Run) -> list[float]:
    return [event["lr"] for event in run.events("step")]


@pytest.mark.parametrize("plan", PLANS)
def test_the_rates_are_those_of_a_plain_loop(plan: str, tmp_path: Path) -> None:
    run = fit(plan, tmp_path / "run", model=pairs, inputs=lambda batch: batch["x"], optimizer=adamw(sequential))
    expected = [rate for rate, _ in plain(sequential)]
    assert rates(run) == expected
    assert len(set(expected)) > 4


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_run_that_goes_on_under_another_plan_has_the_rates_it_would_have_had(name: str, tmp_path: Path) -> None:
    how: dict[str, Any] = {"optimizer": adamw(SCHEDULERS[name])}
    whole = fit("single", tmp_path / "whole", **how)
    fit("fsdp=2 zero=3", tmp_path / "parts", epochs=None, steps=3, **how)
    fit("pp=2 micro=8", tmp_path / "parts", resume=True, epochs=None, steps=5, **how)
    parts = fit("dp=2", tmp_path / "parts", resume=True, **how)
    assert rates(parts) == rates(whole) == [rate for rate, _ in plain(SCHEDULERS[name])]
    assert parts.losses == pytest.approx(whole.losses, rel=1e-5)


@pytest.mark.parametrize("plan", ["single", "dp=2", "fsdp=2 zero=3 micro=8", "tp=2", "pp=2 micro=8"])
def test_one_that_moves_betas_is_proven(plan: str) -> None:
    proof = px.prove(
        job(model=pairs, inputs=lambda batch: batch["x"], optimizer=adamw(SCHEDULERS["one cycle"])),
        plan,
        steps=STEPS,
    )
    assert proof.equal, proof


class TestPlateau:
    """With evaluations that get worse, from the first to the last."""

    HOW: ClassVar[dict[str, Any]] = {
        "optimizer": lambda params: (made := SGD(params, lr=0.5), ReduceLROnPlateau(made, factor=0.5, patience=0)),
        "evaluate": lambda: table(23, 1),
        "evaluate_every": 1,
    }

    @staticmethod
    def plain() -> list[float]:
        """The rates of a loop by hand over the batches of one epoch that is not shuffled."""
        torch.manual_seed(0)
        data, held_out, model = table(), table(23, 1), Net()
        optimizer = SGD(model.parameters(), lr=0.5)
        scheduler, found = ReduceLROnPlateau(optimizer, factor=0.5, patience=0), list[float]()
        model.load_state_dict(START)
        every, there = data.__getitems__(list(range(len(data)))), held_out.__getitems__(list(range(23)))
        for start in (*range(0, len(data), BATCH), *range(0, len(data), BATCH)):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            x, y = (every[key][start : start + BATCH] for key in ("x", "y"))
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                scheduler.step(float(nn.functional.cross_entropy(model(there["x"]), there["y"])))
        return found

    @staticmethod
    def model() -> nn.Module:
        model = Net()
        if next(model.parameters()).device.type != "meta":
            model.load_state_dict(START)
        return model

    @pytest.mark.parametrize("plan", ["single", "dp=2", "fsdp=2 zero=3 micro=8", "pp=2 micro=8"])
    def test_the_rates_are_those_of_a_plain_loop(self, plan: str, tmp_path: Path) -> None:
        run = fit(plan, tmp_path / "run", shuffle=False, model=self.model, **self.HOW)
        expected = self.plain()
        assert rates(run) == expected
        assert len(set(expected)) > 2

    @pytest.mark.parametrize("every", [0, 1])  # 1: a checkpoint comes before the evaluation after its step
    def test_an_evaluation_beside_a_checkpoint_counts_once(self, every: int, tmp_path: Path) -> None:
        how = {**self.HOW, "checkpoint_every": every}
        whole = fit("single", tmp_path / "whole", **self.HOW)
        for steps in range(1, STEPS):
            fit("single", tmp_path / "parts", resume=steps > 1, epochs=None, steps=steps, **how)
        parts = fit("dp=2", tmp_path / "parts", resume=True, **how)
        assert rates(parts) == rates(whole)

    def test_it_follows_the_metric_of_best_and_is_proven(self) -> None:
        def optimizer(params: Any) -> Any:
            made = SGD(params, lr=0.5)
            return made, ReduceLROnPlateau(made, mode="max", factor=0.5, patience=0)

        how = {**self.HOW, "optimizer": optimizer, "best": px.Best("accuracy", mode="max")}
        metrics = lambda output, batch: {"accuracy": px.accuracy(output, batch["y"])}  # noqa: E731
        proof = px.prove(job(metrics=metrics, **how), "dp=2", steps=6)
        assert proof.equal, proof


torch.manual_seed(3)
START = {name: value.clone() for name, value in Net().state_dict().items()}
_other = SGD([nn.Parameter(torch.ones(1))], lr=0.1)
_plateau = lambda one: ReduceLROnPlateau(one, mode="max")  # noqa: E731
_step = lambda one: StepLR(one, 1)  # noqa: E731


class Unsaved(StepLR):
    """Keeps what is no JSON."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, 1)
        self.where = Path()


@pytest.mark.parametrize(
    ("plan", "how", "words"),
    [
        ("dp=2", {"optimizer": adamw(lambda _: StepLR(_other, 1))}, "a StepLR over another optimizer than the AdamW"),
        ("dp=2", {"optimizer": lambda params: (SGD(params, lr=0.1), 3)}, r"a function that gives \(SGD, int\)"),
        ("dp=2", {"optimizer": adamw(_step), "schedule": px.Schedule(warmup_steps=3)}, "StepLR and Schedule.*one of"),
        ("dp=2 server=1", {"optimizer": adamw(_step)}, "StepLR under .*plans without servers"),
        ("dp=2", {"optimizer": adamw(ReduceLROnPlateau)}, "no evaluation before the end.*evaluate_every"),
        (
            "dp=2",
            {"optimizer": adamw(_plateau), "evaluate": table, "evaluate_every": 2},
            "mode='max'.*would follow loss",
        ),
        ("dp=2", {"optimizer": adamw(Unsaved)}, "whose state cannot be saved: .* at where"),
    ],
)
def test_what_cannot_be_honoured_is_refused_before_a_worker_starts(
    plan: str, how: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from phalanx.launch.local import LocalLauncher

    def started(*_: Any) -> Any:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(LocalLauncher, "start", started)
    with pytest.raises((RefusedError, SpecError), match=f"(?s)job.optimizer.*{words}"):
        fit(plan, tmp_path / "run", **how)


def test_a_checkpoint_of_another_scheduler_is_refused(tmp_path: Path) -> None:
    fit("single", tmp_path / "run", epochs=None, steps=2, optimizer=adamw(_step))
    with pytest.raises(PhalanxError, match="saved with the scheduler StepLR, this is SequentialLR"):
        fit("single", tmp_path / "run", resume=True, optimizer=adamw(sequential))


def test_a_loop_of_ones_own_has_no_evaluations_to_follow() -> None:
    with pytest.raises(RefusedError, match="ReduceLROnPlateau for a loop of one's own"):
        px.build(job(**TestPlateau.HOW))
    step, loader = px.build(job(optimizer=adamw(sequential)))
    assert [step(batch).lr for batch in loader] == [rate for rate, _ in plain(sequential)]
