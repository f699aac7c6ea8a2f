"""The gradients of a step are those of its batch, whatever lay in ``.grad`` before: as when two models share a loss."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # once here, not in every worker
import torch.nn.functional as F
from small import job
from torch import nn

import phalanx as px
from phalanx.comm import Place, default_process_group
from phalanx.config import Plan
from phalanx.launch import launch
from phalanx.train.assembly import build

PLANS = ("single", "threads=2", "dp=2", "fsdp=2 zero=1", "fsdp=2 zero=2 micro=8", "fsdp=2", "tp=2", "pp=2 micro=8")
# gradients that others leave of the parameters that zero=1, 2 and threads keep beside those that the optimizer steps
BACKWARDS = ("single", "dp=2", "fsdp=2 zero=1", "fsdp=2 zero=2 micro=8")


class Net(nn.Module):
    """Two blocks whose weights pair up, so that every plan can split it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(9, 12), nn.GELU(), nn.Linear(12, 9)) for _ in range(2)])
        self.head = nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def losses(plan: str, spoil: Callable[[Any], None]) -> list[list[float]]:
    """Of a run that nobody disturbs, and of one with ``spoil`` before each step."""
    chosen = Plan.parse(f"{plan} device=cpu")

    def work(place: Place, report: Callable[[int], None]) -> list[list[float]]:
        torch.set_num_threads(1)
        with default_process_group(place, torch.device("cpu")):
            found: list[list[float]] = []
            for disturb in (lambda layout: None, spoil):
                assembly = build(job(model=Net, clip=0.05, epochs=1), chosen, place, torch.device("cpu"))
                found.append([])
                for batch in assembly.loader:
                    disturb(assembly.layout)
                    found[-1].append(assembly.step(batch).loss)
            return found

    return launch(work, chosen.world_size)[0]


def leave_gradients(layout: Any) -> None:
    for tensor in (*layout.holdings.module.parameters(), *layout.parameters.values()):
        tensor.grad = torch.full_like(tensor, 1000.0)


def run_backward(layout: Any) -> None:
    layout.holdings.module(torch.ones(4, 9)).sum().mul(1000.0).backward()


@pytest.mark.parametrize("plan", PLANS)
def test_gradients_that_lie_about_are_dropped(plan: str) -> None:
    clean, spoilt = losses(plan, leave_gradients)
    assert spoilt == clean


@pytest.mark.parametrize("plan", BACKWARDS)
def test_a_backward_between_steps_leaves_nothing(plan: str) -> None:
    clean, spoilt = losses(plan, run_backward)
    assert spoilt == clean


class Pair:
    """A generator and a discriminator, two jobs that read each other, and what plain PyTorch makes of them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.g, self.d = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), nn.Linear(2, 1)

    def jobs(self) -> tuple[px.Job, px.Job]:
        g, d = self.g, self.d
        draw = torch.Generator().manual_seed(1)
        table = px.Table(real=torch.randn(64, 2, generator=draw), z=torch.randn(64, 4, generator=draw))

        def of_d(output: Any, batch: Any) -> px.Loss:
            half = len(output) // 2
            return px.Loss(F.softplus(-output[:half]).sum() + F.softplus(output[half:]).sum(), half)

        common: dict[str, Any] = {
            "data": lambda: table,
            "optimizer": lambda params: torch.optim.SGD(params, 0.1),
            "batch": 16,
            "epochs": 2,
        }
        return (
            px.Job(
                model=lambda: d,
                inputs=lambda batch: torch.cat([batch["real"], g(batch["z"]).detach()]),
                loss=of_d,
                **common,
            ),
            px.Job(
                model=lambda: g,
                inputs=lambda batch: batch["z"],
                loss=lambda output, batch: px.Loss(F.softplus(-d(output)).sum(), len(output)),
                **common,
            ),
        )

    def plain(self, batches: list[Any]) -> list[tuple[float, float]]:
        g, d = copy.deepcopy((self.g, self.d))
        of_g, of_d = torch.optim.SGD(g.parameters(), 0.1), torch.optim.SGD(d.parameters(), 0.1)
        found: list[tuple[float, float]] = []
        for batch in batches:
            of_d.zero_grad()
            loss_d = (F.softplus(-d(batch["real"])) + F.softplus(d(g(batch["z"]).detach()))).mean()
            loss_d.backward()
            of_d.step()
            of_g.zero_grad()
            loss_g = F.softplus(-d(g(batch["z"]))).mean()
            loss_g.backward()
            of_g.step()
            found.append((loss_d.item(), loss_g.item()))
        return found


@pytest.mark.parametrize("plan", ["single", "dp=2", "fsdp=2 zero=1"])
def test_two_builds_that_share_a_loss_train_as_a_plain_loop_does(plan: str) -> None:
    pair = Pair()
    chosen = Plan.parse(f"{plan} device=cpu")
    alone = build(pair.jobs()[0], Plan.parse("single device=cpu"), Place(), torch.device("cpu"))
    expected = pair.plain([step.parts[0][0].batch for step in alone.loader])

    def work(place: Place, report: Callable[[int], None]) -> list[list[float]]:
        torch.set_num_threads(1)
        with default_process_group(place, torch.device("cpu")):
            first, second = (build(one, chosen, place, torch.device("cpu")) for one in pair.jobs())
            return [[first.step(b).loss, second.step(b).loss] for b in each(first.loader)]

    found = launch(work, chosen.world_size)[0]
    assert len(found) == 8
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def each(loader: Any) -> Iterator[Any]:
    """The steps of one loader, for both builds: their data are the same."""
    yield from loader
