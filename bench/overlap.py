"""How much of what keeps replicas together hides behind computing: what forecasts assume, measured on the runtime.

Blocks sleep, as the host does while a device computes, so that reducing takes no time from them; each has 16 MiB of
parameters. What a plan costs beyond one process that sleeps as long is what it does not hide; what it costs where
nothing sleeps is what there is to hide: messages, copies into buckets, waiting.

``overlap.py [--rounds N] [--write]``; the second table computes in place of sleeping, on cores that reducing needs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import phalanx as px
from compare import announce
from phalanx.comm import Place, default_process_group
from phalanx.config import Plan
from phalanx.launch.local import launch
from phalanx.train.assembly import build
from stored import load, save

BLOCKS, WIDTH, SECONDS, STEPS = 8, 2048, 0.03, 6
PLANS = ("dp=2", "fsdp=2 zero=1", "fsdp=2 zero=2", "fsdp=2")


class Waits(torch.autograd.Function):
    """Takes its time, both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return grad, None


class Block(nn.Module):
    """A layer whose forward takes ``seconds`` and whose backward takes twice as long, asleep."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Waits.apply(self.linear(x), self.seconds))


def job(seconds: float, samples: int, ranks: int) -> px.Job:
    """Blocks that sleep so long, for so many samples on each rank."""
    return px.Job(
        model=lambda: nn.Sequential(*(Block(seconds) for _ in range(BLOCKS))),
        data=lambda: px.Table(x=torch.randn(samples * ranks, WIDTH)),
        inputs=lambda batch: batch["x"],
        loss=lambda output, batch: output.square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
        batch=samples * ranks,
        epochs=STEPS,
    )


def stepped(given: px.Job, plan: Plan) -> Callable[..., float]:
    """A worker's work: its median seconds from one step's end to the next, the first two left out."""

    def work(place: Place, report: Any) -> float:
        torch.set_num_threads(1)
        with default_process_group(place, torch.device("cpu")):
            assembly = build(given, plan, place, torch.device("cpu"))
            ends: list[float] = []
            for batch in assembly.loader:
                assembly.step(batch)
                ends.append(time.perf_counter())
            return statistics.median(late - early for early, late in pairwise(ends[1:]))

    return work


def seconds_of(plan: Plan, sleeps: float, samples: int) -> float:
    """Of a step, on its slowest rank."""
    return max(launch(stepped(job(sleeps, samples, plan.replicas), plan), plan.world_size))


def hidden(plan: Plan, sleeps: float, samples: int, more: int) -> tuple[float, float]:
    """The share of a plan's cost that ``sleeps`` seconds a block, or ``more`` samples, hide; and that cost, seconds."""
    alone = Plan()
    bare = seconds_of(plan, 0.0, samples) - seconds_of(alone, 0.0, samples)
    busy = seconds_of(plan, sleeps, more) - seconds_of(alone, sleeps, more)
    return 1 - busy / bare, bare


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="into bench/results/overlap.json")
    asked = parser.parse_args()
    announce()
    tables = load("overlap")
    for name, sleeps, more in (("asleep", SECONDS, 4), ("computing", 0.0, 256)):
        print(f"{name}: plan, share of its cost that is hidden (median, lowest, highest of {asked.rounds}), its cost")
        rows: dict[str, Any] = {}
        for text in PLANS:
            found = [hidden(Plan.parse(text), sleeps, 4, more) for _ in range(asked.rounds)]
            shares, cost = sorted(share for share, _ in found), statistics.median(bare for _, bare in found)
            middle = statistics.median(shares)
            rows[text] = {"hidden": round(middle, 3), "cost_s": round(cost, 4), "rounds": asked.rounds}
            print(f"{text:16} {middle:6.2f} {shares[0]:6.2f} {shares[-1]:6.2f} {cost:8.3f} s", flush=True)
        tables[name] = rows
    if asked.write:
        save("overlap", tables)
    return 0


if __name__ == "__main__":
    sys.exit(main())
