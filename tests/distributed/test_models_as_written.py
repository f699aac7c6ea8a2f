"""Models that are written otherwise than a stack of blocks: split, they give what one device gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import job
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import phalanx as px
from law_rows import longer
from phalanx.config import Plan
from phalanx.errors import RefusedError
from phalanx.verify import OneDevice

WIDTH, CLASSES = 9, 5


def layer(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Stack(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([layer() for _ in range(layers)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for each in self.layers:
            x = x + self.run(each, x)
        return self.head(x)

    def run(self, each: nn.Module, x: Tensor) -> Tensor:
        return each(x)


class Recomputed(Stack):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def run(self, each: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(each, x, use_reentrant=self.reentrant)


class Cells(nn.Module):
    """Layers held by containers that have no forward, one inside another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.cells = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "pair": nn.ModuleList([layer(), layer()])}) for _ in range(2)
        )
        self.ends = nn.ModuleDict({"left": layer(), "right": layer()})
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        cell: Any
        for cell in self.cells:
            normed = cell["norm"](x)
            x = x + cell["pair"][0](normed) + cell["pair"][1](normed)
        return self.head(self.ends["left"](x) + self.ends["right"](x))


class FrozenAndTied(nn.Module):
    """The head is the table of the embedding, and neither learns."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList([layer() for _ in range(4)])
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.table.weight
        self.table.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table((x[:, 0] > 0).long())
        for each in self.layers:
            x = x + each(x)
        return self.head(x)


class Distilled(nn.Module):
    """A large frozen teacher before a small student: half of the stages have nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = Stack(6), Stack(2)
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            taught = self.teacher(x)
        return self.student(x), taught


def distance(output: tuple[Tensor, Tensor], batch: Any) -> px.Loss:
    found, taught = output
    return px.Loss((found - taught).square().sum() + F.cross_entropy(found, batch["y"], reduction="sum"), len(found))


class Centred(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.mean(0), 0.5)
        return super().forward(x - self.mean)


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH, sparse=True)
        self.layers = nn.ModuleList([layer() for _ in range(2)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table((3 * x).abs().long().clamp(max=6)).mean(1)
        for each in self.layers:
            x = x + each(x)
        return self.head(x)


class Normed(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "normed": Normed,
    "centred": Centred,
    "rows": Rows,
    "recomputed": partial(Recomputed, reentrant=False),
    "recomputed, reentrant": partial(Recomputed, reentrant=True),
    "cells": Cells,
    "frozen and tied": FrozenAndTied,
    "distilled": Distilled,
}


def small(model: str, **how: Any) -> px.Job:
    # 40 samples in batches of 13: the last one has a single sample
    if model == "rows":
        how = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1), **how}
    given = {"model": MODELS[model], "data": partial(data, 40), "batch": 13, "epochs": None, "steps": 4, "clip": 1.0}
    return job(**given, **({"loss": distance} if model == "distilled" else {}), **how)


def data(length: int) -> px.Table:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(length, WIDTH, generator=generator)
    return px.Table(x=x, y=torch.randint(CLASSES, (length,), generator=generator))


@cache
def one_device(model: str) -> OneDevice:
    return OneDevice.run(small(model), 4)


def assert_equal(model: str, plan: str) -> None:
    proof = one_device(model).prove(Plan.parse(plan))
    assert proof.equal, f"{proof.first}\n{proof.cause}"


ALIKE = [name for name in MODELS if name not in ("centred", "rows", "normed")]
CHOSEN = [
    *(("recomputed, reentrant", "pp=2 micro=4"), ("cells", "fsdp=2 recompute=selective")),
    # Micro-batches of 4 make 4 of a batch; the last batch has one sample.
    ("distilled", "pp=2 micro=4 schedule=interleaved"),
    ("frozen and tied", "pp=2 fsdp=2 zero=1 micro=2"),
]
PLANS = (
    "pp=2",
    "pp=2 micro=4",
    "pp=2 micro=5 schedule=zbv",
    "fsdp=2",
    "pp=2 micro=1 schedule=zero-bubble",
    "pp=2 micro=3 schedule=dualpipev",
)


@pytest.mark.parametrize(("model", "plan"), [*CHOSEN, *longer(*((model, plan) for model in ALIKE for plan in PLANS))])
def test_equal(model: str, plan: str) -> None:
    assert_equal(model, plan)


@pytest.mark.parametrize("plan", ["tp=2", *longer("pp=2")])
def test_a_look_at_the_model_leaves_its_buffers_as_they_were(plan: str) -> None:
    assert_equal("centred", plan)


def test_stages_keep_their_own_running_statistics() -> None:
    # One step: the bias before a normalisation has no gradient but rounding, of which AdamW then makes whole steps.
    proof = OneDevice.run(small("normed"), 1).prove(Plan.parse("pp=2"))
    assert proof.equal, f"{proof.first}\n{proof.cause}"


@pytest.mark.parametrize("plan", ["dp=2", *longer("single", "pp=2 micro=4")])
def test_sparse_gradients_are_added_up_clipped_and_compared(plan: str) -> None:
    assert_equal("rows", plan)


@pytest.mark.parametrize("plan", ["fsdp=2", *longer("dp=2 server=1", "fsdp=2 zero=1", "pp=2 fsdp=2")])
def test_sparse_gradients_that_nothing_cuts_are_refused(plan: str) -> None:
    with pytest.raises(RefusedError, match="sparse gradients of table"):
        px.fit(small("rows"), plan)


def fitted(model: str, plan: str, folder: Path, steps: int, **how: Any) -> list[float]:
    run = px.RunSpec(job="small", plan=Plan.parse(plan), folder=folder, forecast="none", **how)
    return px.fit(replace(small(model), steps=steps), run=run).losses


@pytest.mark.parametrize(
    ("model", "other"),
    [("frozen and tied", "single"), *longer(("distilled", "pp=4"), ("distilled", "single"), ("distilled", "fsdp=2"))],
)
def test_a_run_whose_stages_have_nothing_to_train_goes_on(model: str, other: str, tmp_path: Path) -> None:
    """Saved under a pipeline and taken up under ``other``, and the other way round: what the whole run gives."""
    pipeline = "pp=2 micro=4"
    whole = fitted(model, "single", tmp_path / "whole", 4)
    for before, after in ((pipeline, other), (other, pipeline)):
        folder = tmp_path / before
        fitted(model, before, folder, 2, checkpoint_every=2)
        assert fitted(model, after, folder, 4, resume=True) == pytest.approx(whole, rel=1e-5)
