"""What staleness costs in accuracy, and what helps against it: every gradient exactly so many updates old.

``python bench/staleness.py [--seeds N] [--write]``. One process: the parameters, updates and compensation are those of
a parameter server; gradients are computed on the parameters of ``staleness`` updates ago. That is the worst case of
``staleness=N``, in which a run's gradients are at most so old. ``--write`` puts the tables into
docs/reference/staleness.md.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

import phalanx as px
from phalanx.comm import Place
from phalanx.parallel.server.update import Pushed, Rule, Shard
from phalanx.spec.keys import Compensate
from phalanx.train.assembly import Assembly, Parameters, build
from phalanx.train.evaluate import evaluate
from quality import digits, gpt

PAGE = Path(__file__).parent.parent / "docs/reference/staleness.md"
STALENESS = (0, 1, 2, 4, 8, 16)
WAYS: tuple[Compensate, ...] = ("none", "rate", "delay")


def slowly(make: Callable[[], px.Job], factor: float) -> px.Job:
    """The job with every learning rate times ``factor``."""
    job = make()

    def optimizer(params: Parameters) -> torch.optim.Optimizer:
        found = job.optimizer(params)
        for group in found.param_groups:
            group["lr"] *= factor
        return found

    return replace(job, optimizer=optimizer)


def digits_sgd() -> px.Job:
    """The same net with plain SGD."""
    return replace(digits(), optimizer=lambda params: torch.optim.SGD(params, lr=0.05))


JOBS: dict[str, tuple[str, Callable[[], px.Job]]] = {
    "digits": ("A convolutional net on 8 x 8 digits, AdamW at 0.003, 100 steps of 64 images.", digits),
    "digits, a third of the rate": ("The same at 0.001.", lambda: slowly(digits, 1 / 3)),
    "digits, plain SGD": ("The same net, SGD at 0.05.", digits_sgd),
    "gpt": ("A GPT of 0.47 million parameters on text, AdamW at 0.006, clipped, 200 steps of 32 windows.", gpt),
    "gpt, a third of the rate": ("The same at 0.002.", lambda: slowly(gpt, 1 / 3)),
}


def final_loss(job: px.Job, staleness: int, way: Compensate) -> float:
    """The validation loss after training ``job`` with gradients that are ``staleness`` updates old."""
    assembly = build(job, px.Plan(), Place())
    step, parameters = assembly.step, assembly.layout.parameters
    shard = Shard(parameters, lambda named: job.optimizer(Parameters(named)), Rule(compensate=way))
    history = deque([_copied(shard)], maxlen=staleness + 1)
    for batch in assembly.loader:
        number = batch.step
        _put(history[0], parameters)
        step.backward(batch)
        gradient = shard.blank()
        for name, tensor in parameters.items():
            assert tensor.grad is not None
            gradient.named[name].copy_(tensor.grad)
            tensor.grad = None
        step.progress.step += 1
        oldest = number - len(history) + 1
        shard.push(Pushed(step=number, part=0, version=oldest), gradient)
        norm = math.sqrt(shard.prepare(number, [0]))
        total = assembly.loader.total_steps or 1
        rate = job.schedule.factor(step=number, batch=job.batch, total_steps=total)
        scale = min(1.0, job.clip / (norm + 1e-6)) if job.clip else 1.0
        shard.apply(number, scale=scale, rate=rate, oldest=max(0, number + 1 - staleness))
        history.append(_copied(shard))
    _put(history[-1], parameters)
    return _evaluated(job, assembly)


def _copied(shard: Shard) -> dict[str, torch.Tensor]:
    with shard.values() as (_, flat):
        return {name: tensor.clone() for name, tensor in flat.named.items()}


def _put(values: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in parameters.items():
            tensor.copy_(values[name])


def _evaluated(job: px.Job, assembly: Assembly) -> float:
    assert job.evaluate is not None
    found = evaluate(job, px.Plan(), assembly, job.evaluate()).loss
    return found if found is not None and math.isfinite(found) else math.inf


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--write", action="store_true")
    options.add_argument("--only", default="")
    asked = options.parse_args()
    torch.set_num_threads(1)
    console, pages = Console(width=120), []
    for name, (said, make) in ((name, one) for name, one in JOBS.items() if asked.only in name):
        losses = {
            (staleness, way): [_try(replace(make(), seed=seed), staleness, way) for seed in range(asked.seeds)]
            for staleness in STALENESS
            for way in WAYS
            if staleness or way == "none"
        }
        lines = list(table(losses))
        console.print(f"[bold]{name}[/]", *lines, sep="\n", highlight=False)
        pages += [f"## {name}", "", said, "", *lines, ""]
    if asked.write:
        PAGE.write_text("\n".join([*HEAD, *pages]).rstrip() + "\n", encoding="utf-8")
    return 0


def _try(job: px.Job, staleness: int, way: Compensate) -> float:
    try:
        return final_loss(job, staleness, way)
    except px.PhalanxError:
        return math.inf  # the loss was not a number any more


HEAD = (
    "# Convergence under staleness",
    "",
    "Final validation loss where every gradient is exactly so many updates old, which is the worst that `staleness=N`",
    "of [parameter servers](../explanation/parameter-server.md) allows: median over seeds, and their range. `rate` and",
    "`delay` are what `compensate` does against staleness. Real runs are mostly fresher than their bound.",
    "`python bench/staleness.py --write` writes this page.",
    "",
)


def table(losses: Mapping[tuple[int, str], list[float]]) -> Iterator[str]:
    """The losses as markdown: a row for each staleness."""
    yield "| staleness | plain | `compensate=rate` | `compensate=delay` |"
    yield "| --- | --- | --- | --- |"
    for staleness in STALENESS:
        cells = [_cell(losses[staleness, way]) if (staleness, way) in losses else "" for way in WAYS]
        yield f"| {staleness} | {' | '.join(cells)} |"


def _cell(losses: list[float]) -> str:
    if math.inf in losses:
        finite = [loss for loss in losses if loss < math.inf]
        return f"diverges in {len(losses) - len(finite)} of {len(losses)}"
    return f"{statistics.median(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})"


if __name__ == "__main__":
    sys.exit(main())
