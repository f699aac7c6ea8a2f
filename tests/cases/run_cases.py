"""The grid of jobs × plans: each cell in a process of its own, with a limit of time, and the page of what came.

``run_cases.py PAGE [--only WORD] [--plan PLAN] [--jobs N] [--render]``. Runs the cases with the word (``make cases``
all), stores what came beside this file, and writes the page from what is stored; ``--render`` only writes. Exits with 1
where something else came than must.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from case_grid import Came, came, wrong
from case_loops import LOOPS, looped
from case_table import CASES, PLANS
from grid_store import Grid, Store, cell_text


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
