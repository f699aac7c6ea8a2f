"""How long the ranks of a pipeline stand idle, against what their schedule makes inevitable.

With more ranks than cores a measured idle share says what the machine does. So the blocks of one pipeline of four
ranks do nothing but sleep, which any number of ranks can do at once: what is left is the schedule's own waiting and
what the running of it adds. A second one, of as many ranks as there are cores to count on (two), really computes.

The theory: the order of the schedule, each block's forward and either half of its backward taking the same time and
messages none; for GPipe and 1F1B that is (p - 1) / (m + p - 1) (Narayanan et al. 2021, section 2.2).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

import jobs
import phalanx as px
from compare import rounds_from_command_line
from phalanx.comm import Place, default_process_group
from phalanx.config import Plan
from phalanx.config.plan import Schedule
from phalanx.launch.local import launch
from phalanx.placement.schedules import Action, bubble, order
from phalanx.train.assembly import build

SECONDS, MICROS, WITHIN = 0.05, 8, 0.10

Work = tuple[str, int, int, float, float]
"""Kind, stage, micro-batch, begin, end: as ``PipelineRunner.on_event`` tells it."""


class _Sleep(torch.autograd.Function):
    """Takes its time, both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(SECONDS)
        return grad, None


class Sleeper(nn.Module):
    """A block whose forward, and each half of whose backward, takes ``SECONDS`` and no processor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.shift = nn.Parameter(torch.zeros(16))  # the first block's input wants no gradient, but this does

    def forward(self, x: Tensor) -> Tensor:
        weight = _Sleep.apply(self.linear.weight, 0.0)
        return torch.tanh(nn.functional.linear(_Sleep.apply(x + self.shift, SECONDS), weight, self.linear.bias))


def sleeping() -> px.Job:
    """Eight blocks that sleep."""
    return px.Job(
        model=lambda: nn.Sequential(*(Sleeper() for _ in range(8))),
        data=lambda: px.Table(x=torch.randn(MICROS, 16)),
        inputs=lambda batch: batch["x"],
        loss=lambda output, batch: output.square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch=MICROS,
        steps=3,
    )


def computing() -> px.Job:
    """The GPT that is split over ranks elsewhere in these benchmarks."""
    return replace(jobs.gpt_split(), epochs=None, steps=5)


def worked(job: px.Job, plan: Plan) -> Callable[..., list[list[Work]]]:
    """A worker's work: for each step but the first its pieces of work."""

    def work(place: Place, report: Any) -> list[list[Work]]:
        torch.set_num_threads(1)
        with default_process_group(place, torch.device("cpu")):
            assembly = build(job, plan, place, torch.device("cpu"))
            steps: list[list[Work]] = []
            assembly.layout._stages.runner.on_event = lambda *piece: steps[-1].append(piece)
            for batch in assembly.loader:
                steps.append([])
                assembly.step(batch)
            return steps[1:]

    return work


def idle(ranks: list[list[Work]]) -> float:
    """The share of the ranks' time, from the first beginning to the last end, in which they do no work."""
    pieces = [piece for rank in ranks for piece in rank]
    whole = (max(end for *_, end in pieces) - min(begin for *_, begin, _ in pieces)) * len(ranks)
    return 1 - sum(end - begin for *_, begin, end in pieces) / whole


def costs(steps: list[list[list[Work]]]) -> Callable[[Action], float]:
    """What each kind of work of each stage took, on average over micro-batches and steps."""
    found: dict[tuple[str, int], list[float]] = {}
    for ranks in steps:
        for kind, stage, _, begin, end in (piece for rank in ranks for piece in rank):
            found.setdefault((kind, stage), []).append(end - begin)
    return lambda action: sum(found[action.kind, action.stage]) / len(found[action.kind, action.stage])


def main() -> int:
    rounds = rounds_from_command_line(1)
    print(f"idle share of a pipeline, {MICROS} micro-batches, median step (bar: within {WITHIN:.0%} of theory)")
    print(f"{'ranks':16} {'schedule':12} measured  theory  with measured costs  off by")
    met = True
    for job, ranks, micro in ((sleeping(), 4, 1), (computing(), 2, 2)):
        for schedule in get_args(Schedule):
            plan = Plan(pp=ranks, schedule=schedule, micro=micro)
            steps: list[list[list[Work]]] = []
            for _ in range(rounds):
                steps += [list(ranks) for ranks in zip(*launch(worked(job, plan), ranks), strict=True)]
            shares = sorted(idle(ranks) for ranks in steps)
            share, schedules = shares[len(shares) // 2], order(schedule, ranks, plan.stages, MICROS)
            theory = bubble(schedules)
            good = abs(share / theory - 1) <= WITHIN
            met = met and good
            print(
                f"{ranks}, {'asleep' if micro == 1 else 'computing':12} {schedule:12} {share:8.3f}  {theory:6.3f}"
                f"  {bubble(schedules, costs(steps)):19.3f}  {share / theory - 1:+6.1%}  {'met' if good else 'MISSED'}",
                flush=True,
            )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
