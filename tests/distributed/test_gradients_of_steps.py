"""Gradients of a step: those of its batch alone, and none that only one rank leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # once here, not in every worker
from small import Net, OfOutput, job
from torch import nn

from longer import longer
from phalanx.comm import Place, default_process_group
from phalanx.config import Plan
from phalanx.errors import WorkerError
from phalanx.launch import launch
from phalanx.parallel import assemble
from phalanx.train.assembly import build

PLANS = ("threads=2", "fsdp=2 zero=2 micro=8", "pp=2 micro=8", *longer("single", "dp=2", "fsdp=2", "tp=2"))


# gradients that others leave of the parameters that zero=1, 2 and threads keep beside those that the optimizer steps
BACKWARDS = ("dp=2", "fsdp=2 zero=1", *longer("single", "fsdp=2 zero=2 micro=8"))


class Blocks(nn.Module):
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
                assembly = build(job(model=Blocks, clip=0.05, epochs=1), chosen, place, torch.device("cpu"))
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


class Branching(Net):
    """Leaves its branch out where the first value of the data is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Linear(9, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if float(x[0, 0]) == 0 else x + self.branch(x))


def three_steps(plan: Plan, unused: str, left_out: list[bool]) -> Callable[[Place, Any], list[float]]:
    """A worker's work: in the second step rank 1 leaves the branch out in those of its micro-batches."""

    backward = OfOutput(lambda output: output.square().sum())

    def work(place: Place, report: Any) -> list[float]:
        torch.set_num_threads(1)
        with default_process_group(place, torch.device("cpu")):
            torch.manual_seed(0)
            layout = assemble(Branching(), job(unused=unused), plan, place.rank, torch.device("cpu"))
            optimizer = torch.optim.SGD(layout.parameters.values(), lr=0.01)
            for step in range(3):
                report(step)
                micros = [torch.ones(4, 9) * (0.5 + place.rank) for _ in left_out]
                for micro, out in zip(micros, left_out, strict=True):
                    micro[0, 0] *= not (out and step == 1 and place.rank == 1)
                layout.accumulate([micros], backward)
                layout.finish()
                optimizer.step()
                layout.stepped()
            return [float(tensor.detach().double().sum()) for tensor in layout.module.parameters()]

    return work


@pytest.mark.parametrize(
    ("plan", "left_out"),
    [
        ("dp=2", [False, True]),  # only the last micro-batch's backward communicates
        ("fsdp=2 zero=1", [True]),
        ("fsdp=2 zero=2", [True, True]),
        *longer(("dp=2", [True]), ("fsdp=2 zero=2", [True])),
    ],
)
def test_left_out_by_one_rank_in_a_later_step(plan: str, left_out: list[bool]) -> None:
    with pytest.raises(WorkerError) as caught:
        launch(three_steps(Plan.parse(f"{plan} device=cpu"), "error", left_out), 2)
    assert (caught.value.rank, caught.value.step, caught.value.kind) == (1, 1, "GradientError")
    assert ("branch.weight, branch.bias" in str(caught.value)) == all(left_out)
    assert 'unused="allow"' in str(caught.value)


@pytest.mark.parametrize("plan", ["dp=2", "fsdp=2 zero=2", *longer("fsdp=2 zero=1")])
def test_allowed_it_takes_the_gradient_of_the_ranks_that_have_one(plan: str) -> None:
    first, second = launch(three_steps(Plan.parse(f"{plan} device=cpu"), "allow", [True]), 2)
    assert first == second


def test_a_micro_batch_may_leave_out_what_another_uses() -> None:
    first, second = launch(three_steps(Plan.parse("fsdp=2 zero=2 device=cpu"), "error", [False, True]), 2)
    assert first == second
