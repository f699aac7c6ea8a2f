"""The long parity table: every plan x model x number of ranks against one device, after 20 AdamW steps in fp32.

``python bench/parity.py --write docs/reference/parity.md`` also writes the page. Exits with 1 where the bar is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import phalanx as px
from parity_jobs import JOBS
from phalanx.errors import PhalanxError

STEPS, BAR = 20, 1e-5
EACH = [
    "dp={n}",
    "dp={n} micro=2",
    "threads={n}",
    "fsdp={n} zero=1",
    "fsdp={n} zero=2",
    "fsdp={n} zero=2 micro=2",
    "fsdp={n}",
    "fsdp={n} micro=2",
    "dp={n} recompute=full",
    "fsdp={n} recompute=selective",
    "dp={n} offload=optimizer",
    "fsdp={n} zero=1 offload=optimizer",
    "fsdp={n} offload=parameters",
]
PLANS: dict[int, list[str]] = {
    1: ["micro=3", "micro=5 recompute=full", "offload=optimizer"],
    **{ranks: [plan.format(n=ranks) for plan in EACH] for ranks in (2, 3, 4)},
}
PLANS[4] += ["dp=2 fsdp=2 zero=1", "dp=2 fsdp=2 zero=2", "dp=2 fsdp=2"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One proof: largest relative differences, or why there is none."""

    loss: float = 0.0
    gradient: float = 0.0
    refused: str = ""

    @property
    def good(self) -> bool:
        return not self.refused and self.loss <= BAR and self.gradient <= BAR

    def __str__(self) -> str:
        if self.refused:
            return "**failed**"
        text = f"{self.loss:.0e} / {self.gradient:.0e}"
        return text if self.good else f"**{text}**"


def prove(model: str, plan: str) -> Cell:
    """One cell of the table."""
    try:
        proof = px.prove(JOBS[model](), plan, steps=STEPS)
    except PhalanxError as error:  # a table that stops at the first failure hides the others
        return Cell(refused=f"{model}, {plan}: {type(error).__name__}: {error}")
    return Cell(loss=proof.largest["loss"], gradient=proof.largest["gradient"])


def page(rows: dict[str, list[Cell]], models: Sequence[str], seconds: float) -> str:
    """The table as a page."""
    cells = [cell for row in rows.values() for cell in row]
    worst = max((max(cell.loss, cell.gradient) for cell in cells), default=0.0)
    lines = [
        "# Parity",
        "",
        f"The job on one device against the same job under each plan, {STEPS} AdamW steps in fp32: the largest",
        "relative difference of a step's loss / of a parameter's first gradient. The global batch is 14: shares and",
        "micro-batches are uneven. The language models clip, and their token counts differ by rank.",
        "",
        f"{sum(cell.good for cell in cells)} of {len(cells)} are within {BAR:.0e}; the largest is {worst:.1e}.",
        f"Written by `make parity` with torch {torch.__version__} in {seconds / 60:.0f} minutes.",
        "",
        "| plan | " + " | ".join(models) + " |",
        "| --- |" + " --- |" * len(models),
        *(f"| `{plan}` | " + " | ".join(map(str, row)) + " |" for plan, row in rows.items()),
    ]
    failed = [cell.refused for cell in cells if cell.refused]
    if failed:
        lines += ["", "## Failed", "", *(f"- {' '.join(text.split())}" for text in failed)]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="the page to write")
    parser.add_argument("--models", nargs="*", default=list(JOBS), help="some of: " + ", ".join(JOBS))
    parser.add_argument("--ranks", nargs="*", type=int, default=list(PLANS), help="some of: 1 2 3 4")
    given = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    rows: dict[str, list[Cell]] = {}
    for plan in [plan for ranks in given.ranks for plan in PLANS[ranks]]:
        rows[plan] = [prove(model, plan) for model in given.models]
        print(f"{plan:36}", "  ".join(f"{cell!s:15}" for cell in rows[plan]), flush=True)
    text = page(rows, given.models, time.perf_counter() - began)
    if given.write:
        given.write.write_text(text)
    else:
        print(text)
    return 0 if all(cell.good for row in rows.values() for cell in row) else 1


if __name__ == "__main__":
    sys.exit(main())
