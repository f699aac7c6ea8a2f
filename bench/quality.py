"""What each way to keep replicas together costs in accuracy: the final validation loss at equal samples, over seeds.

``python bench/quality.py [--seeds N] [--only WORD] [--write] [--render]``. Every plan trains the same job for the same
steps; the measure is its validation loss against that of synchronous training with the same seed. The bar: within 2 %;
what is worse is shown all the same. ``--write`` stores what was measured in bench/results and writes
docs/project/quality.md from all that is stored; ``--render`` writes the page and measures nothing.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

import phalanx as px
from compare import announce
from phalanx.config import RunSpec
from phalanx.demo.jobs.digits import job as digits_job
from phalanx.demo.jobs.gpt import gpt_job
from phalanx.events import RunLog
from stored import load, save

RESULTS = "quality"
PAGE = Path(__file__).parent.parent / "docs/project/quality.md"
BAR = 0.02
SYNCHRONOUS = "dp=2"
PLANS = (
    *("dp=2 shares=3,1", "dp=2 shares=auto"),
    *("dp=2 server=1", "dp=2 server=1 staleness=1", "dp=2 server=1 staleness=4", "dp=2 server=1 staleness=unbounded"),
    *("dp=2 server=1 staleness=1 after=50", "dp=2 server=1 staleness=4 after=50"),
    *("dp=2 server=1 backup=1", "dp=2 server=1 staleness=1 compress=int8"),
    *("dp=2 sync=local every=4", "dp=2 sync=local every=16", "dp=2 sync=local every=16 after=50"),
    *("dp=2 sync=diloco every=10", "dp=2 sync=diloco every=25"),
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
        loss: validation loss, median over seeds.
        worse: how much larger the loss is than the synchronous one of the same seed, as a share of it: the median.
        low: of those shares, the smallest.
        high: the largest.
        seeds: how many; ``None`` where that was not recorded.
        on: the day.
    """

    plan: str
    loss: float
    worse: float
    low: float
    high: float
    seeds: int | None
    on: str

    @classmethod
    def of(cls, plan: str, losses: list[float], synchronous: list[float]) -> Row:
        """From the losses by seed."""
        ratios = [loss / other for loss, other in zip(losses, synchronous, strict=True)]
        return cls(
            plan=plan,
            loss=round(statistics.median(losses), 4),
            worse=round(statistics.median(ratios) - 1, 4),
            low=round(min(ratios) - 1, 4),
            high=round(max(ratios) - 1, 4),
            seeds=len(losses),
            on=datetime.date.today().isoformat(),
        )

    def cells(self) -> tuple[str, ...]:
        """As a row of the table."""
        return (
            f"`{self.plan}`",
            f"{self.loss:.4f}",
            f"{self.worse:+.1%}",
            f"{self.low:+.1%} to {self.high:+.1%}",
            "" if self.worse <= BAR else "above 2 %",
            f"{self.on}, {f'{self.seeds} seeds' if self.seeds else 'seeds not recorded'}",
        )


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--only", default="", help="plans with this word")
    options.add_argument("--job", default="", help="jobs with this word")
    options.add_argument("--write", action="store_true", help="store what was measured, and write the page")
    options.add_argument("--render", action="store_true", help="write the page from what is stored; measure nothing")
    options.add_argument("--page", type=Path, default=PAGE)
    asked = options.parse_args()
    announce()
    stored: dict[str, dict[str, Row]] = {
        name: {plan: Row(plan=plan, **row) for plan, row in rows.items()} for name, rows in load(RESULTS).items()
    }
    if not asked.render:
        for name, row in measured(asked.job, asked.only, asked.seeds):
            stored.setdefault(name, {})[row.plan] = row
    if asked.write:
        rows = {name: {plan: _told(row) for plan, row in rows.items()} for name, rows in stored.items()}
        save(RESULTS, rows)
    if asked.write or asked.render:
        asked.page.write_text(page(stored), encoding="utf-8")
    return 0


def measured(job: str, only: str, seeds: int) -> Iterator[tuple[str, Row]]:
    """The rows of the jobs and plans asked for, each as it is known, after the synchronous one."""
    console = Console(width=140)
    for name, make in ((name, make) for name, make in JOBS.items() if job in name):
        synchronous = [final_loss(make(), SYNCHRONOUS, seed) for seed in range(seeds)]
        for plan in (SYNCHRONOUS, *(plan for plan in PLANS if only in plan)):
            other = plan != SYNCHRONOUS
            losses = [final_loss(make(), plan, seed) for seed in range(seeds)] if other else synchronous
            row = Row.of(plan, losses, synchronous)
            console.print(name, *row.cells(), sep="  ", highlight=False)
            yield name, row


HEAD = (
    "# Accuracy of every way to keep replicas together",
    "",
    "Final validation loss against synchronous training with the same seed, at equal samples: medians over seeds, and",
    "their spread. Two workers of one thread each; real runs, so that staleness is what timing made it. Learning rates",
    "are those of synchronous training, not tuned for any row. `python bench/quality.py --write` writes this page.",
    "",
)


def page(stored: Mapping[str, Mapping[str, Row]]) -> str:
    """The page, from what is stored; what was not measured says so."""
    lines = list(HEAD)
    for name, make in JOBS.items():
        lines += [f"## {name}", "", make.__doc__ or "", ""]
        lines += ["| plan | loss | against `dp=2` | over seeds | | measured |", "| --- | --- | --- | --- | --- | --- |"]
        for plan in (SYNCHRONOUS, *PLANS):
            row = stored.get(name, {}).get(plan)
            lines.append(f"| {' | '.join(row.cells() if row else (f'`{plan}`', '', '', '', '', 'not yet'))} |")
        lines.append("")
    return "\n".join(lines)


def _told(row: Row) -> dict[str, Any]:
    return {name: value for name, value in asdict(row).items() if name != "plan"}


def final_loss(job: px.Job, plan: str, seed: int) -> float:
    """The validation loss at the end of training ``job`` from ``seed`` under ``plan``."""
    with tempfile.TemporaryDirectory(prefix="phalanx-quality-") as scratch:
        folder = Path(scratch) / "run"
        run = RunSpec(job=job.name, plan=px.Plan.parse(plan), folder=folder, forecast="none")
        px.fit(replace(job, seed=seed), run=run, cores=1)
        return [event for event in RunLog(folder).events if event["event"] == "evaluate"][-1]["loss"]


if __name__ == "__main__":
    sys.exit(main())
