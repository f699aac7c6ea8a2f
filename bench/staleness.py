"""What staleness costs in accuracy: every gradient exactly so many updates old.

``python bench/staleness.py [--seeds N] [--only WORD] [--write] [--render]``. One process: the parameters and updates
are those of a parameter server; gradients are computed on the parameters of ``staleness`` updates ago.
That is the worst case of ``staleness=N``, in which a run's gradients are at most so old. ``--write`` stores what was
measured in bench/results and writes docs/project/staleness.md from all that is stored; ``--render`` only writes.
"""

from __future__ import annotations

import argparse
import datetime
import math
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import phalanx as px
from compare import announce
from phalanx.comm import Place
from phalanx.parallel.parameter_server.update import Pushed, Rule, Shard, Update
from phalanx.train.assembly import Assembly, build
from phalanx.train.elementwise import Parameters
from phalanx.train.evaluate import evaluate
from quality import digits, gpt
from stored import load, save

RESULTS = "staleness"
PAGE = Path(__file__).parent.parent / "docs/project/staleness.md"
STALENESS = (0, 1, 2, 4, 8, 16)


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


def final_loss(job: px.Job, staleness: int) -> float:
    """The validation loss after training ``job`` with gradients that are ``staleness`` updates old."""
    assembly = build(job, px.Plan(), Place(), torch.device("cpu"))
    step, parameters = assembly.step, assembly.layout.parameters
    shard = Shard(parameters, lambda named: job.optimizer(Parameters(named)), Rule())
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
        shard.push(Pushed(step=number, part=0), gradient)
        norm = math.sqrt(shard.prepare(number, [0]))
        total = assembly.loader.total_steps or 1
        rate = job.schedule.factor(step=number, batch=job.batch, total_steps=total)
        scale = min(1.0, job.clip / (norm + 1e-6)) if job.clip else 1.0
        shard.apply(Update(step=number, scale=scale, rate=rate))
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
    options.add_argument("--only", default="", help="jobs with this word")
    options.add_argument("--write", action="store_true", help="store what was measured, and write the page")
    options.add_argument("--render", action="store_true", help="write the page from what is stored; measure nothing")
    options.add_argument("--page", type=Path, default=PAGE)
    asked = options.parse_args()
    announce()
    torch.set_num_threads(1)
    stored = load(RESULTS)
    if not asked.render:
        for name in (name for name in JOBS if asked.only in name):
            stored[name] = measured(JOBS[name][1], asked.seeds)
            print(name, *table(stored[name]), sep="\n")
    if asked.write:
        save(RESULTS, stored)
    if asked.write or asked.render:
        asked.page.write_text(page(stored), encoding="utf-8")
    return 0


def measured(make: Callable[[], px.Job], seeds: int) -> dict[str, Any]:
    """A job's losses: a row for each staleness."""
    today = datetime.date.today().isoformat()
    rows: dict[str, Any] = {}
    for staleness in STALENESS:
        losses = [_try(replace(make(), seed=seed), staleness) for seed in range(seeds)]
        rows[str(staleness)] = {"on": today, "seeds": seeds, "none": summary(losses)}
    return rows


def summary(losses: Sequence[float]) -> list[float] | str:
    """Median, smallest and largest; in words where one was not a number any more."""
    finite = [loss for loss in losses if loss < math.inf]
    if len(finite) < len(losses):
        return f"diverges in {len(losses) - len(finite)} of {len(losses)}"
    return [round(found, 3) for found in (statistics.median(losses), min(losses), max(losses))]


def _try(job: px.Job, staleness: int) -> float:
    try:
        return final_loss(job, staleness)
    except px.PhalanxError:
        return math.inf  # the loss was not a number any more


HEAD = (
    "# Convergence under staleness",
    "",
    "Final validation loss where every gradient is exactly so many updates old, which is the worst that `staleness=N`",
    "of [parameter servers](../explanation/parameter-server.md) allows: median over seeds, and their range.",
    "Real runs are mostly fresher than their bound.",
    "`python bench/staleness.py --write` writes this page.",
    "",
)


def page(stored: Mapping[str, Mapping[str, Any]]) -> str:
    """The page, from what is stored."""
    lines = list(HEAD)
    for name, (said, _) in JOBS.items():
        lines += [f"## {name}", "", said, "", *table(stored.get(name, {})), ""]
    return "\n".join(lines)


def table(rows: Mapping[str, Any]) -> Iterator[str]:
    """The losses as markdown: a row for each staleness."""
    yield "| staleness | loss | measured |"
    yield "| --- | --- | --- |"
    for staleness in map(str, STALENESS):
        row = rows.get(staleness)
        if row is None:
            yield f"| {staleness} |  | not yet |"
            continue
        seeds = f"{row['seeds']} seeds" if row["seeds"] else "seeds not recorded"
        yield f"| {staleness} | {_cell(row['none'])} | {row['on']}, {seeds} |"


def _cell(found: Sequence[float] | str) -> str:
    if isinstance(found, str):
        return found
    middle, low, high = found
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    sys.exit(main())
