"""What a look at the model refuses before a plan runs is what running it refuses; what it accepts, trains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import phalanx as px
from phalanx.config import Plan
from phalanx.demo.jobs import gpt
from phalanx.errors import PhalanxError, Problem, RefusedError
from phalanx.train.look_ahead import refusals


def job() -> px.Job:
    return gpt.gpt_job(layers=2, width=24, heads=4, context=12, batch=8, steps=1)


def of_fit(text: str, folder: Path) -> list[Problem]:
    try:
        px.fit(job(), text, folder=folder)
    except RefusedError as error:
        return list(error.problems)
    return []


@pytest.mark.parametrize(
    "text", ["tp=3", "tp=5", "cp=5", "cp=3 attention=alltoall", "ep=2", "pp=7", "pp=2 split=nonsense", "dp=9"]
)
def test_what_a_look_says_is_what_fit_does(text: str, tmp_path: Path) -> None:
    assert of_fit(text, tmp_path / "run") == refusals(job(), Plan.parse(text))


def table() -> px.Table:
    return px.Table(input=torch.linspace(-1, 1, 96 * 4).view(96, 4), label=torch.arange(96) % 2)


def small_job(**changed: Any) -> px.Job:
    given: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 2),
        "data": table,
        "loss": lambda output, batch: px.cross_entropy(output, batch["label"]),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "batch": 32,
        "epochs": 2,
    }
    return px.Job(**{**given, **changed})


def samples() -> Iterator[dict[str, Any]]:
    for number in range(96):
        yield {"input": torch.ones(4) * number, "label": number % 2}


def one_cycle(steps: int) -> Any:
    def optimizer(params: Any) -> Any:
        made = torch.optim.SGD(params, lr=0.1)
        return made, OneCycleLR(made, 0.1, total_steps=steps)

    return optimizer


def sparse_adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(params)


def collected(output: Any, batch: Any) -> dict[str, Any]:
    return {"right": px.Metric(sums={"right": output.sum()}, compute=lambda right: right)}


BEFORE: dict[str, tuple[str, dict[str, Any], str]] = {
    "a best metric that nothing gives": ("dp=2", {"evaluate": table, "best": px.Best("acc")}, "best.metric.*'acc'"),
    "in one process": ("single", {"evaluate": table, "best": px.Best("acc")}, "best.metric.*'acc'"),
    "a computed metric with servers": ("dp=2 server=1", {"evaluate": table, "metrics": collected}, "with servers"),
    "lazy layers": ("dp=2", {"model": lambda: nn.LazyLinear(2)}, "no shape before the first batch: weight"),
    "SyncBatchNorm": (
        "fsdp=2",
        {"model": lambda: nn.Sequential(nn.SyncBatchNorm(4), nn.Linear(4, 2))},
        "SyncBatchNorm",
    ),
    "SparseAdam": ("dp=2", {"optimizer": sparse_adam}, "SparseAdam .* dense: weight, bias"),
    "a short schedule": ("single", {"optimizer": one_cycle(3)}, "OneCycleLR for 3 steps in a run of 6"),
    "a generator": ("dp=2", {"data": samples}, "a generator, which can be read once, for 2 epochs"),
}


@pytest.mark.parametrize("case", BEFORE)
def test_refused_before_the_folder_is_made(case: str, tmp_path: Path) -> None:
    plan, changed, message = BEFORE[case]
    plan += " device=cpu" if case == "SyncBatchNorm" else ""
    with pytest.raises(PhalanxError, match=message) as raised:
        px.fit(small_job(**changed), plan, folder=tmp_path / "run")
    assert raised.value.exit_code == RefusedError.exit_code
    assert not (tmp_path / "run").exists()


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 2, sparse=True)

    def forward(self, label: torch.Tensor) -> torch.Tensor:
        return self.words(label)


FINE: dict[str, tuple[str, dict[str, Any]]] = {
    "a best metric of a dict": (
        "single",
        {
            "evaluate": table,
            "best": px.Best("of.one"),
            "metrics": lambda output, batch: {
                "of": px.Metric(sums={"n": torch.tensor(float(len(output)))}, compute=lambda n: {"one": n / (n > 2)})
            },
        },
    ),
    "SyncBatchNorm alone": ("single", {"model": lambda: nn.Sequential(nn.SyncBatchNorm(4), nn.Linear(4, 2))}),
    "SyncBatchNorm over the global batch": (
        "fsdp=2",
        {"model": lambda: nn.Sequential(nn.SyncBatchNorm(4), nn.Linear(4, 2)), "batch_statistics": "global"},
    ),
    "SparseAdam": ("dp=2", {"model": Words, "optimizer": sparse_adam}),
    "a schedule as long as the run": ("dp=2", {"optimizer": one_cycle(6)}),
    "a generator once": ("dp=2", {"data": samples, "epochs": 1}),
}


@pytest.mark.parametrize("case", FINE)
def test_what_is_right_beside_it_trains(case: str, tmp_path: Path) -> None:
    plan, changed = FINE[case]
    run = px.fit(small_job(**changed), plan, folder=tmp_path / "run")
    assert len(run.losses) == (3 if "once" in case else 6)
