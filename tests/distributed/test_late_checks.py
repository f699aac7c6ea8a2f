"""Several ranks on a stand-in for devices with streams: all check a step's numbers at the same moment."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import phalanx as px
from phalanx.device_kinds import host
from phalanx.device_kinds import kind_of as real_kind_of
from phalanx.errors import WorkerError
from phalanx.train import grad_accumulation
from phalanx.train import step as steps

BATCH, SAMPLES = 8, 48


class Event:
    def record(self, stream: Any = None) -> None:
        return

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        return


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores with streams: forked workers inherit it."""
    for name, value in {"streams": True, "event": lambda self, **_: Event()}.items():
        monkeypatch.setattr(type(host()), name, value)
    monkeypatch.setattr(type(host()), "current_stream", lambda self, device: Event())
    accelerator = copy.copy(host())
    accelerator.on_host = False  # type: ignore[misc]

    def kind_of(device: Any, named: str = "auto") -> Any:
        return accelerator if real_kind_of(device, named) is host() else real_kind_of(device, named)

    monkeypatch.setattr(grad_accumulation, "kind_of", kind_of)


def job(optimizer: Any, *, bad: int | None = None) -> px.Job:
    inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
    if bad is not None:
        inputs[bad * BATCH] = float("inf")

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    return px.Job(
        model=model,
        data=lambda: px.Table(input=inputs, label=torch.arange(SAMPLES) % 3),
        loss=lambda output, batch: px.cross_entropy(output, batch["label"]),
        optimizer=optimizer,
        batch=BATCH,
        epochs=1,
        shuffle=False,
        clip=1.0,
    )


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def one_rank_chooses(params: Any) -> torch.optim.Optimizer:
    """On one stage of a pipeline another implementation than on the other."""
    first = any(tensor.shape[-1] == 6 for tensor in params)
    return torch.optim.AdamW(params, lr=0.01, foreach=True if first else None)


PLANS = ["dp=2", "fsdp=2 zero=1", "fsdp=2 zero=2", "fsdp=2", "pp=2 micro=4", "fsdp=2 micro=2 precision=bf16"]


def losses(run: px.Run) -> list[float]:
    return [event["loss"] for event in run.events("step")]


@pytest.mark.parametrize("plan", PLANS)
def test_losses_are_those_of_steps_checked_at_once(plan: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    at_once = px.fit(job(adamw), plan, folder=tmp_path / "at-once", drift="off", watch=False)
    request.getfixturevalue("streams")
    late = px.fit(job(adamw), plan, folder=tmp_path / "late", drift="off", watch=False)
    assert losses(late) == pytest.approx(losses(at_once), rel=1e-3 if "bf16" in plan else 1e-5)


@pytest.mark.parametrize("optimizer", [adamw, one_rank_chooses])
@pytest.mark.parametrize("plan", PLANS[1:])
@pytest.mark.usefixtures("streams")
def test_every_rank_stops(plan: str, optimizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkerError, match="the loss of step 3 is nan"):
        px.fit(job(optimizer, bad=3), plan, folder=tmp_path / "run", drift="off", watch=False, checkpoint_every=5)
    assert list((tmp_path / "run" / "checkpoints").glob("step-*")) == []


def test_the_stand_in_checks_late(streams: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    real = steps.Step._every_rank_can_skip

    def told(self: Any, *given: Any) -> bool:
        asked.append(real(self, *given))
        return asked[-1]

    monkeypatch.setattr(steps.Step, "_every_rank_can_skip", told)
    step, loader = px.build(job(adamw), "single")
    for batch in loader:
        step(batch)
    assert asked == [True]
