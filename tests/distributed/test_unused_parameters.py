"""A parameter that one rank leaves out in a later step stops the run where it must not be left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small import Net, OfOutput, job
from torch import nn

from phalanx.comm import Place, default_process_group
from phalanx.config import Plan
from phalanx.errors import WorkerError
from phalanx.launch import launch
from phalanx.parallel import assemble


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
        ("dp=2", [True]),
        ("dp=2", [False, True]),  # only the last micro-batch's backward communicates
        ("fsdp=2 zero=1", [True]),
        ("fsdp=2 zero=2", [True]),
        ("fsdp=2 zero=2", [True, True]),
    ],
)
def test_left_out_by_one_rank_in_a_later_step(plan: str, left_out: list[bool]) -> None:
    with pytest.raises(WorkerError) as caught:
        launch(three_steps(Plan.parse(f"{plan} device=cpu"), "error", left_out), 2)
    assert (caught.value.rank, caught.value.step, caught.value.kind) == (1, 1, "GradientError")
    assert "got no gradient on this rank" in str(caught.value)
    assert ("branch.weight, branch.bias" in str(caught.value)) == all(left_out)
    assert 'unused="allow"' in str(caught.value)


@pytest.mark.parametrize("plan", ["dp=2", "fsdp=2 zero=1", "fsdp=2 zero=2"])
def test_allowed_it_takes_the_gradient_of_the_ranks_that_have_one(plan: str) -> None:
    first, second = launch(three_steps(Plan.parse(f"{plan} device=cpu"), "allow", [True]), 2)
    assert first == second


def test_a_micro_batch_may_leave_out_what_another_uses() -> None:
    first, second = launch(three_steps(Plan.parse("fsdp=2 zero=2 device=cpu"), "error", [False, True]), 2)
    assert first == second
