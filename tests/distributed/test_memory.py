"""What a run says that its memory held: by hand, what each plan must save, and what was forecast."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from small import fit
from torch import nn

import phalanx as px
from law_rows import longer
from phalanx.demo.jobs.gpt import GPT, Size
from phalanx.events import faults
from phalanx.forecast.layouts import Layouts
from phalanx.forecast.memory import memory
from phalanx.forecast.presets import PHALANX
from phalanx.placement.step_traffic import parameters_held
from phalanx.report.summary import summarise
from phalanx.trace import ModelCall, Profile

SIZE = Size(layers=4, width=32, heads=4, context=16)


def texts(context: int = SIZE.context) -> px.Table:
    tokens = torch.randint(256, (32, context + 1), generator=torch.Generator().manual_seed(0))
    return px.Table(x=tokens[:, :-1].contiguous(), y=tokens[:, 1:].contiguous())


Found = tuple[list[dict[str, int]], list[float]]
"""What each rank held, and the losses."""


def found(plan: str, **how: Any) -> Found:
    given: dict[str, Any] = {
        "model": lambda: GPT(SIZE),
        "data": texts,
        "inputs": lambda batch: batch["x"],
        "batch": 16,
        "epochs": 1,
        **how,
    }
    with TemporaryDirectory() as folder:
        run = fit(plan, folder, **given)
        assert [fault for event in run.events("memory") for fault in faults(event)] == []
        return list(summarise(run.folder).memory), run.losses


@cache
def of_texts(plan: str) -> Found:
    return found(plan)


def held(plan: str, **how: Any) -> list[dict[str, int]]:
    """What each rank held under the plan."""
    return (found(plan, **how) if how else of_texts(plan))[0]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(9, 20), nn.Linear(20, 5)
        self.register_buffer("scale", torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()) * self.get_buffer("scale")


def test_an_mlp_by_hand() -> None:
    (parts,) = held("single", model=Layers, data=_rows, batch=32)
    numbers = (9 * 20 + 20) + (20 * 5 + 5)
    assert parts["parameters"] == parts["gradients"] == 4 * numbers
    assert parts["optimizer"] == 8 * numbers + 4 * 4
    assert parts["buffers"] == 4 * 5
    # Input, what relu gives (which is the second layer's input), log-probabilities; labels; and the loss's own count.
    assert parts["activations"] == 32 * 4 * (9 + 20 + 5) + 32 * 8 + 4


def test_recompute_keeps_less() -> None:
    none, selective, full = (held(f"single recompute={how}")[0]["activations"] for how in ("none", "selective", "full"))
    inputs = SIZE.layers * 16 * 16 * SIZE.width * 4
    block = none / SIZE.layers  # and a part of what is outside the blocks
    assert full < selective < none
    assert inputs < full < inputs + block + 2 * 16 * 16 * 256 * 4


def test_recomputed_slices_count() -> None:
    """What blocks keep of a slice is the slice: with ``cp=2`` half of what one device keeps, and a part of it twice."""
    (alone,), slices = held("single recompute=full"), held("cp=2 recompute=full")
    for one in slices:
        assert alone["activations"] / 2 <= one["activations"] < alone["activations"]


@pytest.mark.parametrize("plan", ["cp=2", *longer("tp=2 sequence=true", "fsdp=2")])
def test_measuring_changes_nothing(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = of_texts(f"{plan} recompute=full")[1]
    monkeypatch.setattr("phalanx.train.memory_use._MEASURED", 0)
    assert found(f"{plan} recompute=full")[1] == measured


class Sparse(Layers):
    """A layer over a matrix that lies in memory in no one run, and one whose gradient does not."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(5, 5, sparse=True)
        self.register_buffer("mixed", torch.eye(5).to_sparse_csr(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.rows(torch.arange(5)).sum(0)
        return torch.sparse.mm(self.get_buffer("mixed"), super().forward(x).T).T + rows


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_what_cannot_be_measured_is_said_and_trains(tmp_path: Path) -> None:
    run = fit(
        "single", tmp_path, model=Sparse, data=_rows, epochs=1, optimizer=lambda params: torch.optim.SGD(params, lr=0.1)
    )
    (said,) = [event["message"] for event in run.events("warning")]
    assert "not counted: Tensor (sparse_csr)" in said
    (parts,) = summarise(run.folder).memory
    assert parts["gradients"] == parts["parameters"] + 5 * 8  # and the numbers of the rows


class Differentiates(Layers):
    """torch.func refuses to run where hooks look at what is saved."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slope = torch.func.grad(lambda value: value.square().sum())(x)
        return super().forward(slope)


def test_a_model_that_differentiates_inside_can_be_measured() -> None:
    (parts,) = held("single", model=Differentiates, data=_rows, batch=32)
    assert parts["activations"] == 32 * 4 * (9 + 20 + 5) + 32 * 8 + 4


def _rows() -> px.Table:
    generator = torch.Generator().manual_seed(0)
    return px.Table(x=torch.randn(64, 9, generator=generator), y=torch.randint(5, (64,), generator=generator))


LARGER = Size(layers=4, width=64, heads=4, context=64)
PARTS = ("parameters", "gradients", "optimizer", "activations")


@pytest.fixture(scope="module")
def profile() -> Profile:
    tokens = torch.zeros(2, LARGER.context, dtype=torch.int64)

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    return ModelCall(module=GPT(LARGER), args=(tokens,), batch=tokens, loss=loss).profile()


FORECAST = (
    *("tp=2 sequence=true", "fsdp=2 zero=1 micro=4", "pp=2 micro=2 schedule=gpipe", "precision=bf16"),
    "fsdp=2 zero=3 recompute=full",
)
ALSO_FORECAST = (
    "fsdp=2 offload=parameters",
    *("single", "single recompute=full", "single recompute=selective", "dp=2 micro=4", "fsdp=2 zero=2"),
    *("pp=2 micro=2 schedule=interleaved", "fsdp=2 zero=3 precision=bf16", "dp=2 offload=optimizer", "tp=2", "cp=2"),
    *("tp=2 recompute=selective", "tp=2 recompute=full", "pp=2 micro=2"),
    *("pp=2 micro=2 schedule=zbv", "pp=2 micro=2 schedule=dualpipev", "pp=2 micro=2 recompute=full"),
    "pp=2 fsdp=2 zero=1",
)


@pytest.mark.parametrize("text", [*FORECAST, *longer(*ALSO_FORECAST)])
def test_runs_hold_what_was_forecast(text: str, profile: Profile, tmp_path: Path) -> None:
    plan = px.Plan.parse(text)
    found = memory(profile, Layouts.of([plan], 16, LARGER.context), PHALANX, plan.precision, 8.0)
    forecast = {name: float(getattr(found, name)[0]) for name in PARTS}
    forecast["parameters"] += float(found.gathered[0])
    run = fit(
        text,
        tmp_path,
        model=lambda: GPT(LARGER),
        data=lambda: texts(LARGER.context),
        inputs=lambda batch: batch["x"],
        batch=16,
        epochs=1,
    )
    ranks = summarise(run.folder).memory
    measured = max(ranks, key=lambda parts: sum(parts.values()))
    steps = 4 * len(list(GPT(LARGER).parameters()))  # AdamW counts them for each tensor, which the forecast leaves out
    for name in ("parameters", "gradients"):
        assert measured[name] == forecast[name]
    assert 0 <= measured["optimizer"] - forecast["optimizer"] <= steps
    assert measured["activations"] == pytest.approx(forecast["activations"], rel=0.05)
    if plan.precision == "fp32" and plan.offload == "none":
        for rank, parts in enumerate(ranks):  # and so does placement
            held = parameters_held(profile, plan, rank)
            assert parts["parameters"] - float(found.gathered[0]) == 4 * held
            stepped = held / plan.fsdp if plan.zero in (1, 2) else held
            assert 8 * stepped <= parts["optimizer"] <= 8 * stepped + steps
