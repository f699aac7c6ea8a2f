"""What is forecast of a rank's memory, against what runs hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small import fit

import phalanx as px
from phalanx.demo.jobs.gpt import GPT, Size
from phalanx.forecast.layouts import Layouts
from phalanx.forecast.memory import memory
from phalanx.forecast.presets import PHALANX
from phalanx.placement.step_traffic import parameters_held
from phalanx.report.summary import summarise
from phalanx.trace import ModelCall, Profile

SIZE = Size(layers=4, width=64, heads=4, context=64)
PARTS = ("parameters", "gradients", "optimizer", "activations")


def texts() -> px.Table:
    tokens = torch.randint(256, (32, SIZE.context + 1), generator=torch.Generator().manual_seed(0))
    return px.Table(x=tokens[:, :-1].contiguous(), y=tokens[:, 1:].contiguous())


@pytest.fixture(scope="module")
def profile() -> Profile:
    tokens = torch.zeros(2, SIZE.context, dtype=torch.int64)

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    return ModelCall(module=GPT(SIZE), args=(tokens,), batch=tokens, loss=loss).profile()


@pytest.mark.parametrize(
    "plan",
    [
        "single",
        "single recompute=full",
        "single recompute=selective",
        "single precision=bf16",
        "dp=2 micro=4",
        "fsdp=2 zero=1 micro=4",
        "fsdp=2 zero=2",
        "fsdp=2 zero=3 recompute=full",
        "fsdp=2 zero=3 precision=bf16",
        "dp=2 offload=optimizer",
        "fsdp=2 offload=parameters",
        "tp=2",
        "tp=2 sequence=true",
        "tp=2 recompute=selective",
        "cp=2",
        "pp=2 micro=2",
        "pp=2 micro=2 schedule=gpipe",
        "pp=2 micro=2 schedule=interleaved",
        "pp=2 micro=2 schedule=zbv",
        "pp=2 micro=2 schedule=dualpipev",
        "pp=2 micro=2 recompute=full",
        "tp=2 recompute=full",
        "pp=2 fsdp=2 zero=1",
    ],
)
def test_runs_hold_what_was_forecast(plan: str, profile: Profile, tmp_path: Path) -> None:
    layouts = Layouts.of([px.Plan.parse(plan)], 16, SIZE.context)
    found = memory(profile, layouts, PHALANX, px.Plan.parse(plan).precision, 8.0)
    forecast = {name: float(getattr(found, name)[0]) for name in PARTS}
    forecast["parameters"] += float(found.gathered[0])
    run = fit(plan, tmp_path, model=lambda: GPT(SIZE), data=texts, inputs=lambda batch: batch["x"], batch=16, epochs=1)
    measured = max(summarise(run.folder).memory, key=lambda parts: sum(parts.values()))
    steps = 4 * len(list(GPT(SIZE).parameters()))  # AdamW counts them for each tensor, which the forecast leaves out
    for name in ("parameters", "gradients"):
        assert measured[name] == forecast[name]
    assert 0 <= measured["optimizer"] - forecast["optimizer"] <= steps
    assert measured["activations"] == pytest.approx(forecast["activations"], rel=0.05)


@pytest.mark.parametrize("text", ["dp=2", "fsdp=2 zero=2", "fsdp=2 zero=3", "tp=2", "pp=2 micro=2"])
def test_placement_forecast_and_measurement_say_the_same_bytes(text: str, profile: Profile, tmp_path: Path) -> None:
    plan = px.Plan.parse(text)
    found = memory(profile, Layouts.of([plan], 16, SIZE.context), PHALANX, plan.precision, 8.0)
    run = fit(text, tmp_path, model=lambda: GPT(SIZE), data=texts, inputs=lambda batch: batch["x"], batch=16, epochs=1)
    measured = summarise(run.folder).memory
    for rank, parts in enumerate(measured):
        held = parameters_held(profile, plan, rank)
        stepped = held / plan.fsdp if plan.zero in (1, 2) else held
        assert parts["parameters"] - float(found.gathered[0]) == 4 * held
        assert parts["gradients"] == 4 * (stepped if plan.zero else held)
        assert 8 * stepped <= parts["optimizer"] <= 8 * stepped + 4 * len(list(GPT(SIZE).parameters()))  # and counts
    most = max(range(2), key=lambda rank: sum(measured[rank].values()))  # the rank that forecasts are of
    held = parameters_held(profile, plan, most)
    assert float(found.parameters[0]) == 4 * held
    assert float(found.optimizer[0]) == 8 * (held / plan.fsdp if plan.zero in (1, 2) else held)
    assert float(found.gradients[0]) == measured[most]["gradients"]
