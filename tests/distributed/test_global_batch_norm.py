"""BatchNorm over the global batch: equal to plain PyTorch on one device with the whole batch in one go."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from law_rows import longer
from phalanx.config import Plan
from phalanx.train.look_ahead import refusals
from phalanx.train.refusals import model_problems
from phalanx.witness import samples
from phalanx.witness.initial import initial_model
from residual import ResNet

LENGTH, BATCH, STEPS, CLASSES = 33, 16, 5, 5  # the third batch has one sample: some ranks have none of it
EXACT = 1e-10
"""Relative difference in fp64: rounding of 1e-16 in some hundred operations, with divisions by small numbers."""


class Layers(nn.Module):
    """Every kind of layer that normalises by the batch, called as people do."""

    def __init__(self) -> None:
        super().__init__()
        self.volumes = nn.Conv3d(1, 4, 2, bias=False)
        self.third = nn.BatchNorm3d(4, momentum=None)
        self.second = nn.SyncBatchNorm(4, eps=1e-3)
        self.first = nn.Linear(8, 8)
        self.apart = nn.BatchNorm1d(8, affine=False)
        self.untracked = nn.BatchNorm1d(8, track_running_stats=False)
        self.frozen = nn.BatchNorm1d(8).requires_grad_(False)
        self.fixed = nn.BatchNorm1d(8).eval()
        self.own = Own(8)
        self.head = nn.Linear(8, CLASSES)

    def train(self, mode: bool = True) -> Layers:
        super().train(mode)
        self.fixed.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = x.mean(1).view(-1, 1, 4, 4, 2)[:, :, :, :3]
        x = torch.relu(self.third(self.volumes(x)))
        x = torch.relu(self.second(x.flatten(3).flatten(2).unflatten(2, (3, 2))))
        x = self.apart(self.first(x[:, :, :2].mean(3).flatten(1)))
        x = self.fixed(self.untracked(torch.relu(x)))
        x = self.frozen(x + 0.3 * self.frozen(x))  # twice
        return self.head(self.own(x))


class Own(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        return F.gelu(F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.2))


def table(length: int = LENGTH) -> px.Table:
    generator = torch.Generator().manual_seed(3)
    x = 5 + torch.randn(length, 3, 8, 4, generator=generator, dtype=torch.float64)
    return px.Table(x=x, y=torch.randint(CLASSES, (length,), generator=generator))


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.head = nn.Linear(96, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(96), nn.Linear(96, 64), nn.Linear(64, 96)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


MODELS = {
    "perceptron": lambda: Perceptron().double(),
    "residual": lambda: ResNet([1, 1], classes=CLASSES, width=4).double(),
    "layers": lambda: Layers().double(),
}


def job(model: str = "residual", **how: Any) -> px.Job:
    given: dict[str, Any] = {
        "model": MODELS[model],
        "data": table,
        "loss": lambda output, batch: px.cross_entropy(output, batch["y"]),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        "batch": BATCH,
        "steps": STEPS,
        "batch_statistics": "global",
        **how,
    }
    return px.Job(**given)


@cache
def plain(model: str, batch: int = BATCH, length: int = LENGTH) -> tuple[list[float], dict[str, Tensor], float]:
    """Losses, the model at the end, and its loss in evaluation mode: a loop without Phalanx."""
    asked = job(model, batch=batch, data=lambda: table(length))
    samples.seed_everything(samples.stream_seed(0, 0))
    module = initial_model(asked).train()
    optimizer = torch.optim.SGD([one for one in module.parameters() if one.requires_grad], lr=0.05, momentum=0.9)
    data, losses = table(length), list[float]()
    for ids in samples.numbers(data, asked, STEPS):
        given = data.__getitems__([int(one) for one in ids])
        optimizer.zero_grad()
        loss = F.cross_entropy(module(given["x"]), given["y"])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    trained = {name: one.clone() for name, one in module.state_dict().items()}
    module.eval()
    whole = table(16).__getitems__(list(range(16)))
    with torch.no_grad():
        return losses, trained, F.cross_entropy(module(whole["x"]), whole["y"]).item()


def apart(found: Any, expected: Any) -> float:
    found, expected = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-3))


def assert_plain(asked: px.Job, plan: str, folder: Path, expected: Any) -> px.Run:
    run = px.fit(asked, run=px.RunSpec(job="norms", plan=Plan.parse(plan), folder=folder, forecast="none"))
    losses, trained, found = expected
    assert apart(run.losses, losses) <= EXACT
    state = run.state_dict()
    assert state.keys() == trained.keys()
    away = {name: apart(one, trained[name]) for name, one in state.items()}
    assert max(away.values()) <= EXACT, {name: one for name, one in away.items() if one > EXACT}
    if asked.evaluate is not None:
        assert apart(run.evaluation["loss"], found) <= EXACT
    return run


PLANS = ("dp=3 shares=3,1,1", "fsdp=2 zero=2", "threads=3")
OTHERS = (
    *("single", "dp=2", "fsdp=2", "fsdp=2 zero=1", "fsdp=2 offload=optimizer", "dp=2 fsdp=2"),
    *("single recompute=selective", "dp=4 recompute=full"),
)


@pytest.mark.parametrize("plan", [*PLANS, *longer(*OTHERS)])
def test_as_one_device(plan: str, tmp_path: Path) -> None:
    asked = job(evaluate=lambda: table(16))
    assert_plain(asked, plan, tmp_path, plain("residual"))


@pytest.mark.parametrize("plan", ["dp=2 recompute=selective", *longer("fsdp=2 recompute=selective", "threads=2")])
def test_every_kind_of_layer(plan: str, tmp_path: Path) -> None:
    # the third batch has three samples: a single value a channel is no batch to any PyTorch
    evaluate = None if "threads" in plan else lambda: table(16)
    asked = job("layers", data=lambda: table(35), evaluate=evaluate)
    assert_plain(asked, plan, tmp_path, plain("layers", length=35))


@pytest.mark.parametrize("plan", ["pp=2 dp=2", *longer("tp=2", "tp=2 dp=2")])
def test_in_split_models(plan: str, tmp_path: Path) -> None:
    """Statistics are of ranks that have samples of their own, not of those that share out one model."""
    assert_plain(job("perceptron", data=lambda: table(35)), plan, tmp_path, plain("perceptron", length=35))


@pytest.mark.parametrize("plan", ["dp=2", *longer("fsdp=2", "threads=2")])
def test_proven_and_not_named(plan: str) -> None:
    said: list[str] = []
    proof = px.prove(job(), plan, steps=3, say=said.append)
    assert proof.equal, f"{proof.first}: {proof.cause}"
    assert not any("BatchNorm" in note for note in said)
    said.clear()
    proof = px.prove(job(batch_statistics="micro"), plan, steps=3, say=said.append)
    assert not proof.equal
    assert 'batch_statistics="global"' in proof.cause
    assert any('batch_statistics="global"' in note for note in said)


@pytest.mark.parametrize(
    ("plan", "where", "fix"),
    [
        ("dp=2 micro=4", "plan.micro", "dp=2"),
        ("micro=8", "plan.micro", "single"),
        ("dp=2 shares=3,1 micro=8", "plan.micro", "dp=2 shares=3,1"),
        ("dp=2 server=1", "plan.server", "dp=2"),
        ("dp=2 sync=local every=2", "plan.sync", "dp=2"),
        ("dp=2 sync=diloco every=2", "plan.sync", "dp=2"),
        ("cp=2", "plan.cp", "dp=2"),
        ("tp=2 sequence=true", "plan.sequence", "tp=2"),
    ],
)
def test_refused_before_any_process_starts(plan: str, where: str, fix: str) -> None:
    asked, chosen = job("perceptron"), Plan.parse(plan)
    (problem,) = model_problems(asked, chosen, asked.model())
    assert (problem.where, problem.fix) == (where, fix)
    assert model_problems(asked, Plan.parse(fix), asked.model()) == []
    assert model_problems(replace(asked, batch_statistics="micro"), chosen, asked.model()) == []
    assert model_problems(replace(asked, model=nn.Flatten), chosen, nn.Flatten()) == []
    assert problem in refusals(asked, chosen) or where in (
        "plan.cp",
        "plan.sequence",
    )  # which a model without attention is refused before


def test_evaluation_share_by_share_is_refused_where_that_takes_statistics() -> None:
    asked = job("layers", evaluate=table)
    (problem,) = model_problems(asked, Plan.parse("threads=2"), asked.model())
    assert problem.fix == "dp=2"
    assert model_problems(replace(asked, evaluate=None), Plan.parse("threads=2"), asked.model()) == []


def test_a_copy_of_the_model_is_plain_again() -> None:
    step, loader = px.build(job(), "threads=2")
    step(next(iter(loader)))
    found = copy.deepcopy(step.layout.module)
    assert found(torch.randn(4, 3, 8, 4, dtype=torch.float64)).shape == (4, CLASSES)  # waits for no other thread
