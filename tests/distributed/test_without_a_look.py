"""What a look at a few samples would refuse is refused where nobody has looked: in a loop of one's own, by torchrun."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from small import fit, job, table
from torch import nn

import phalanx as px
from phalanx.errors import PhalanxError, RefusedError, RunError

SCRIPT = """
import sys
import torch
import phalanx as px
from torch import nn


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x, labels):
        counts = labels >= 0
        return {"loss": (self.layer(x)[:, 0] - labels)[counts].square().mean()}


def data():
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    return px.Table(x=x, labels=torch.where(torch.arange(16) % 2 > 0, x.sum(1).abs(), -1.0))


def job(count):
    return px.Job(model=Own, data=data, loss=px.model_loss(count=count), inputs=lambda batch: dict(batch),
                  optimizer=lambda params: torch.optim.SGD(params, lr=0.1), batch=8, steps=2)


if __name__ == "__main__":
    px.fit(job(lambda batch: len(batch["labels"])), "dp=2", watch=False)
"""


def own() -> dict[str, Any]:
    found: dict[str, Any] = {"__name__": "script"}
    exec(SCRIPT, found)
    return found


def test_a_loop_of_ones_own_refuses_a_loss_that_does_not_add_up() -> None:
    make = own()["job"]
    with pytest.raises(RefusedError, match=r"px\.model_loss"):
        px.build(make(lambda batch: len(batch["labels"])), "single micro=4")
    px.build(make(lambda batch: (batch["labels"] >= 0).sum()), "single micro=4")


def test_torchrun_refuses_a_loss_that_does_not_add_up(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run([*command, "script.py"], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode != 0
    assert "px.model_loss()" in done.stderr


class Normed(nn.Module):
    """Its first parameter is a matrix; a stage may begin with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(9, 9), nn.LayerNorm(9)) for _ in range(4)])
        self.head = nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def by_appearance(params: Any) -> torch.optim.Optimizer:
    """Groups in the order in which their first parameter comes: not that of the model, on some stage."""
    groups: dict[bool, list[Any]] = defaultdict(list)
    named = list(params.named()) if hasattr(params, "named") else []
    every = [one for _, one in named] if named else list(params)
    for one in sorted(every, key=lambda one: len(every) % 3 * one.ndim):
        groups[one.ndim > 1].append(one)
    return torch.optim.SGD([{"params": group} for group in groups.values()], lr=0.1)


@pytest.mark.parametrize("scheduled", [False, True])
def test_groups_in_another_order_on_a_stage_are_refused(scheduled: bool, tmp_path: Path) -> None:
    def optimizer(params: Any) -> Any:
        made = by_appearance(params)
        if not scheduled:
            return made
        return made, torch.optim.lr_scheduler.LambdaLR(made, [lambda step: 1.0, lambda step: 0.5])

    how: dict[str, Any] = {} if scheduled else {"clip": px.Clip(norm=0.5, per="group")}
    with pytest.raises(PhalanxError, match="in another order on a stage"):
        fit("pp=2", tmp_path / "run", model=Normed, optimizer=optimizer, steps=2, epochs=None, **how)


def test_an_average_within_itself_is_the_same_average() -> None:
    given = job(average=px.Average(decay=0.5), evaluate=lambda: table(8), steps=4, epochs=None)
    step, loader = px.build(given)
    for batch in loader:
        step(batch)
    average = step.average
    assert average is not None
    with average.applied():
        within = step.evaluate().loss
        with pytest.raises(RunError, match="averaged weights"):
            step(batch)
    assert step.evaluate().loss == within
