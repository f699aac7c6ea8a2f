"""What each way to keep replicas together costs in accuracy: the final validation loss at equal samples, over seeds.

``python bench/quality.py [--seeds N] [--only WORD] [--write]``. Every plan trains the same job for the same steps; the
measure is its validation loss against that of synchronous training with the same seed. The bar: within 2 %; what is
worse is shown all the same. ``--write`` puts the tables into docs/reference/quality.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

import phalanx as px
from phalanx.demo.jobs.digits import job as digits_job
from phalanx.demo.jobs.gpt import gpt_job
from phalanx.events import read
from phalanx.spec import RunSpec

PAGE = Path(__file__).parent.parent / "docs/reference/quality.md"
BAR = 0.02
SYNCHRONOUS = "dp=2"
PLANS = (
    *("dp=2 shares=3,1", "dp=2 shares=auto"),
    *("dp=2 server=1", "dp=2 server=1 staleness=1", "dp=2 server=1 staleness=4", "dp=2 server=1 staleness=unbounded"),
    *("dp=2 server=1 staleness=4 compensate=rate", "dp=2 server=1 staleness=4 compensate=delay"),
    *("dp=2 server=1 staleness=1 after=50", "dp=2 server=1 staleness=4 after=50"),
    *("dp=2 server=1 backup=1", "dp=2 server=1 staleness=1 compress=int8"),
    *("dp=2 sync=local every=4", "dp=2 sync=local every=16", "dp=2 sync=local every=16 after=50"),
    *("dp=2 sync=diloco every=10", "dp=2 sync=diloco every=25", "dp=2 sync=diloco every=25 fragments=5"),
    *("dp=2 sync=diloco every=25 outer=sgd", "dp=2 sync=diloco every=25 compress=int8"),
    *("dp=2 compress=fp16", "dp=2 compress=bf16", "dp=2 compress=int8", "dp=2 compress=powersgd:4"),
    *("dp=2 compress=topk:0.1", "dp=2 compress=topk:0.01"),
)


def digits() -> px.Job:
    """A convolutional net on 8 x 8 digits, 100 steps of 64 images."""
    return replace(digits_job(), batch=64, epochs=None, steps=100)


def gpt() -> px.Job:
    """A GPT of 0.47 million parameters on text, 200 steps of 32 windows."""
    return gpt_job(steps=200)


JOBS: dict[str, Callable[[], px.Job]] = {"digits": digits, "gpt": gpt}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One plan of one job.

    Attributes:
        plan: it.
        losses: validation loss by seed.
        ratios: of those to the synchronous ones.
    """

    plan: str
    losses: list[float]
    ratios: list[float]

    @property
    def worse(self) -> float:
        """Median over seeds of how much larger the loss is than the synchronous one, as a share of it."""
        return statistics.median(self.ratios) - 1

    def cells(self) -> tuple[str, ...]:
        """As a row of the table."""
        low, high = min(self.ratios) - 1, max(self.ratios) - 1
        met = "" if self.worse <= BAR else "above 2 %"
        return (
            f"`{self.plan}`",
            f"{statistics.median(self.losses):.4f}",
            f"{self.worse:+.1%}",
            f"{low:+.1%} to {high:+.1%}",
            met,
        )


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--only", default="", help="plans with this word")
    options.add_argument("--job", default="", help="jobs with this word")
    options.add_argument("--write", action="store_true")
    asked = options.parse_args()
    console, pages = Console(width=120), []
    for name, make in ((name, make) for name, make in JOBS.items() if asked.job in name):
        console.print(f"[bold]{name}[/]: {make.__doc__}")
        synchronous = [final_loss(make(), SYNCHRONOUS, seed) for seed in range(asked.seeds)]
        rows = [Row(plan=SYNCHRONOUS, losses=synchronous, ratios=[1.0] * len(synchronous))]
        for plan in (one for one in PLANS if asked.only in one):
            losses = [final_loss(make(), plan, seed) for seed in range(asked.seeds)]
            ratios = [loss / other for loss, other in zip(losses, synchronous, strict=True)]
            rows.append(Row(plan=plan, losses=losses, ratios=ratios))
            console.print("  ".join(rows[-1].cells()), highlight=False)
        pages += [f"## {name}", "", make.__doc__ or "", "", *table(rows), ""]
    if asked.write:
        PAGE.write_text("\n".join([*HEAD, *pages]).rstrip() + "\n", encoding="utf-8")
    return 0


HEAD = (
    "# Accuracy of every way to keep replicas together",
    "",
    "Final validation loss against synchronous training with the same seed, at equal samples: medians over seeds, and",
    "their spread. Two workers of one thread each; real runs, so that staleness is what timing made it. Learning rates",
    "are those of synchronous training, not tuned for any row. `python bench/quality.py --write` writes this page.",
    "",
)


def table(rows: list[Row]) -> Iterator[str]:
    """The rows as markdown."""
    yield "| plan | loss | against `dp=2` | over seeds | |"
    yield "| --- | --- | --- | --- | --- |"
    for row in rows:
        yield f"| {' | '.join(row.cells())} |"


def final_loss(job: px.Job, plan: str, seed: int) -> float:
    """The validation loss at the end of training ``job`` from ``seed`` under ``plan``."""
    with tempfile.TemporaryDirectory(prefix="phalanx-quality-") as scratch:
        folder = Path(scratch) / "run"
        run = RunSpec(job=job.name, plan=px.Plan.parse(plan), folder=folder, forecast="none")
        px.fit(replace(job, seed=seed), run=run, cores=1)
        return [event for event in read(folder / "events.jsonl") if event["event"] == "evaluate"][-1]["loss"]


if __name__ == "__main__":
    sys.exit(main())
