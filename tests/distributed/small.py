"""A job that trains in milliseconds, and a way to run it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import phalanx as px
from phalanx.parallel import MicroBatchWork
from phalanx.train.build_model import build_model

LENGTH, BATCH = 103, 32  # the last batch of an epoch has 7


class Net(nn.Module):
    """Three blocks and a head; rows that do not divide over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(9, 9) for _ in range(3)])
        self.head = nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


class Blocks(nn.Module):
    """Residual blocks whose two weights pair up, so that every plan can split them, and a head."""

    def __init__(self, blocks: int = 2, outputs: int = 5) -> None:
        super().__init__()
        made = (nn.Sequential(nn.Linear(9, 12), nn.GELU(), nn.Linear(12, 9)) for _ in range(blocks))
        self.layers, self.head = nn.ModuleList(made), nn.Linear(9, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Normal(nn.Module):
    """Batch normalisation inside blocks and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9)) for _ in range(2)])
        self.last = nn.BatchNorm1d(9)
        self.head = nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(self.last(x))


class OfOutput(MicroBatchWork):
    """A step's work with a loss that depends on the output alone."""

    def __init__(self, loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._loss = loss

    def forward(self, module: nn.Module, device: torch.device, micro: torch.Tensor) -> torch.Tensor:
        return module(micro)

    def loss(self, output: torch.Tensor, device: torch.device, micro: torch.Tensor, last: bool) -> torch.Tensor:
        return self._loss(output)


def table(length: int = LENGTH, seed: int = 0) -> px.Table:
    generator = torch.Generator().manual_seed(seed)
    return px.Table(x=torch.randn(length, 9, generator=generator), y=torch.randint(5, (length,), generator=generator))


def job(**how: Any) -> px.Job:
    """The job, with anything changed."""
    given: dict[str, Any] = {
        "model": Net,
        "data": table,
        "loss": lambda output, batch: px.cross_entropy(output, batch["y"]),
        "optimizer": lambda params: torch.optim.AdamW(params, lr=1e-2),
        "batch": BATCH,
        "epochs": 2,
        **how,
    }
    return px.Job(**given)


def fit(plan: str, folder: str | Path, *, resume: bool = False, checkpoint_every: int = 0, **how: Any) -> px.Run:
    """Train the job under ``plan`` in ``folder``, without a forecast: that takes longer than the run."""
    run = px.RunSpec(
        job="small",
        plan=px.Plan.parse(plan),
        folder=Path(folder),
        resume=resume,
        checkpoint_every=checkpoint_every,
        forecast="none",
    )
    return px.fit(job(**how), run=run)


def batches_of(
    columns: Mapping[str, torch.Tensor], steps: Iterable[Any]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The rows of each step, as ``plain_losses`` takes them."""
    for ids in steps:
        yield columns["x"][ids], columns["y"][ids]


def plain_losses(batches: Iterable[tuple[torch.Tensor, torch.Tensor]], **how: Any) -> list[float]:
    """Plain PyTorch on one device over these ``x`` and ``y``, with the job's initial values and its optimizer."""
    given, net, losses = job(**how), Net(), list[float]()
    net.load_state_dict(build_model(given).state_dict())
    optimizer = given.optimizer(net.parameters())
    for x, y in batches:
        loss = cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
