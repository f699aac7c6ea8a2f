"""A job that trains in milliseconds, and a way to run it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import phalanx as px
from phalanx.parallel import MicroBatchWork

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
