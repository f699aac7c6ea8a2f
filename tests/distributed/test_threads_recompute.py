"""Threads of a CPU share one random stream: what a model recomputes by itself may not draw from it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from small import Net, job, table
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import phalanx as px
from phalanx.errors import RefusedError


class Recomputes(Net):
    """Recomputes each of its layers, with dropout in it or beside it."""

    def __init__(self, *, reentrant: bool = False, preserve: bool = True, inside: float = 0.0, after: float = 0.0):
        super().__init__()
        self.how = {"use_reentrant": reentrant, "preserve_rng_state": preserve}
        self.inside, self.after = inside, after

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = F.dropout(checkpoint(self.run, layer, x, **self.how), self.after, self.training)  # pyright: ignore
        return self.head(x)

    def run(self, layer: torch.nn.Module, x: Tensor) -> Tensor:
        return F.dropout(torch.relu(layer(x)), self.inside, self.training)


def recomputing(**how: bool | float) -> px.Job:
    return job(model=partial(Recomputes, **how), epochs=None, steps=3, data=table)


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_inside_is_refused(reentrant: bool, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="threads share one stream") as caught:
        px.fit(recomputing(reentrant=reentrant, inside=0.1), "threads=2", folder=tmp_path)
    assert "try: dp=2" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_nothing_else_is(reentrant: bool, tmp_path: Path) -> None:
    for index, how in enumerate(({}, {"after": 0.1}, {"inside": 0.1, "preserve": False})):
        run = px.fit(recomputing(reentrant=reentrant, **how), "threads=2", folder=tmp_path / str(index))
        assert len(run.losses) == 3


def test_processes_may(tmp_path: Path) -> None:
    assert len(px.fit(recomputing(inside=0.1), "dp=2", folder=tmp_path).losses) == 3
