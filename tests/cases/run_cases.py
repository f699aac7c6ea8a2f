"""The grid of jobs × plans: each cell in a process of its own, with a limit of time, and the page of what came.

``run_cases.py PAGE [--only WORD] [--plan PLAN] [--jobs N] [--render]``. Runs the cases with the word (``make cases``
all), stores what came beside this file, and writes the page from what is stored; ``--render`` only writes. Exits with 1
where something else came than must.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from case_table import CASES, EQUAL, PLANS, Expected, refused, where
from grid import Came, Grid, Store, came, cell_text, wrong

SCRIPT = Path(__file__).with_name("own_loop.py")
WITHIN = 1e-4
"""Relative difference of numbers after a few steps of Adam: rounding of 6e-8, as often amplified as there are steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """What a loop shows, and what must come of it under each plan."""

    shows: str
    expected: Mapping[str, Expected]


LOOPS: dict[str, Loop] = {
    "two builds": Loop(
        shows="a GAN in a loop of one's own: two builds in turn, one of which calls the other's model",
        expected=where(["pp=2", "pp=2 micro=4"], refused("a pipeline has cut", "job.inputs")),
    ),
    "gradients left behind": Loop(
        shows="`px.build`: gradients of something else lie where a step begins", expected=dict.fromkeys(PLANS, EQUAL)
    ),
}


def looped(name: str, plan: str, folder: Path) -> Came:
    """Run a loop on two ranks of torchrun."""
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, str(SCRIPT), name, plan], capture_output=True, text=True, cwd=folder)
    if done.returncode:
        return Came(outcome="crashed", said=done.stderr.strip()[-2000:])
    told = json.loads(done.stdout.strip().splitlines()[-1])
    if "refused" in told:
        return Came(outcome="refused", said=told["refused"], where=tuple(told["where"]))
    far = max(abs(one - other) / abs(other) for one, other in zip(told["found"], told["plain"], strict=True))
    near = math.isfinite(far) and far <= WITHIN
    return Came(outcome="equal" if near else "unequal", said="" if near else f"numbers differ by {far:.2g}")


def work(name: str, plan: str, folder: Path) -> Came:
    """One cell."""
    return looped(name, plan, folder) if name in LOOPS else came(name, plan)


def expected(name: str, plan: str) -> Any:
    """What must come."""
    return (LOOPS[name].expected if name in LOOPS else CASES[name].expected)[plan]


def shows() -> dict[str, str]:
    """Case → what it shows, in the order of the page."""
    return {name: one.shows for name, one in (*CASES.items(), *LOOPS.items())}


def page(store: Store) -> str:
    """The page, from what is stored."""
    cells = {(name, plan): store.found(name, plan) for name in shows() for plan in PLANS}
    right = sum(1 for cell, found in cells.items() if found and not wrong(expected(*cell), found))
    counts = {word: sum(1 for found in cells.values() if found and found.outcome == word) for word in _COUNTED}
    rows = [
        f"| {name} | {words} | " + " | ".join(_text(name, plan, cells[name, plan]) for plan in PLANS) + " |"
        for name, words in shows().items()
    ]
    said = [
        f"| {name} | {cell_text(words)} |" for name in shows() for words in _said([cells[name, plan] for plan in PLANS])
    ]
    return "\n".join(
        [
            "# Jobs as people write them",
            "",
            "Each job is [proven](../explanation/proof.md) under each plan. What must come of it is worked out before,",
            "from what the job means: *equal* to one device; *named*: different, for a cause that is said before the",
            "run and that the proof gives as well; *near*: said before, and equal as far as rounding lets it be;",
            "*refused* before workers start (in a loop of one's own: before anything is computed), with what to write",
            "instead; *stopped* in a step by an error of the",
            "job's own making, as on one device. Anything else stands in bold.",
            "",
            f"{right} of {len(cells)} are what they must be; {counts['crashed']} crashed, {counts['hung']} hung.",
            f"Written by `make cases` with torch {store.torch}, {' and '.join(store.dates)}.",
            "",
            "| job | shows | " + " | ".join(f"`{plan}`" for plan in PLANS) + " |",
            "| --- | --- |" + " --- |" * len(PLANS),
            *rows,
            "",
            "## What is said",
            "",
            "| job | before the run |",
            "| --- | --- |",
            *said,
            "",
        ]
    )


_COUNTED = ("crashed", "hung")


def _text(name: str, plan: str, found: Came | None) -> str:
    if found is None:
        return "not run"
    must = expected(name, plan)
    return must.outcome if not wrong(must, found) else f"**{found.outcome}**"


def _said(row: Sequence[Came | None]) -> list[str]:
    """What was said before the runs of a job, each text once."""
    found: dict[str, None] = {}
    for one in row:
        if one is not None and one.outcome in ("refused", "stopped"):
            found[one.said] = None
        elif one is not None:
            found.update(dict.fromkeys(one.before))
    return list(found)


GRID = Grid(
    names=list(shows()),
    plans=PLANS,
    results=Path(__file__).with_name("results.json"),
    work=work,
    judge=lambda cell, one: wrong(expected(*cell), one),
    page=page,
)

if __name__ == "__main__":
    sys.exit(GRID.main(__doc__))
