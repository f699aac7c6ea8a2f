"""Two grids of jobs × plans: each cell in a process of its own, with a limit of time, and the page of what came.

``run_grid.py cases|zoo PAGE [--only WORD] [--plan PLAN] [--jobs N] [--render]``. Runs the jobs with the word (``make
cases`` and ``make zoo`` all), stores what came beside this file, and writes the page from what is stored; ``--render``
only writes. Exits with 1 where something else came than must.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import case_table
import zoo_table
from grid import Grid, Store, cell_text
from zoo_libraries import needs, preload_libraries


def cases_page(grid: Grid, store: Store) -> str:
    """The page of jobs as people write them."""
    cells = {cell: store.found(*cell) for cell in grid.cells}
    right = sum(grid.right(store, *cell) for cell in cells)
    crashed, hung = (sum(1 for one in cells.values() if one and one.outcome == word) for word in ("crashed", "hung"))
    said: dict[tuple[str, str], None] = {}  # of a job what was said before its runs, each text once
    for (name, _), one in cells.items():
        if one is not None:
            words = [one.said] if one.outcome in ("refused", "stopped") else one.before
            said.update({(name, text): None for text in words})
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
            f"{right} of {len(cells)} are what they must be; {crashed} crashed, {hung} hung.",
            f"Written by `make cases` with torch {store.torch}, {' and '.join(store.dates)}.",
            "",
            *grid.table(store),
            "",
            "## What is said",
            "",
            "| job | before the run |",
            "| --- | --- |",
            *(f"| {name} | {cell_text(words)} |" for name, words in said),
            "",
        ]
    )


def zoo_page(grid: Grid, store: Store) -> str:
    """The page of the zoo."""
    shown, jobs, plans = [grid.text(store, *cell) for cell in grid.cells], len(grid.cases), len(grid.plans)
    right = sum(grid.right(store, *cell) for cell in grid.cells)
    counts = {word: shown.count(word) for word in ("equal", "named", "refused")}
    # the first problem of a refusal, without the line to copy → plan → jobs
    reasons: dict[str, dict[str, list[str]]] = {}
    for name, plan in grid.cells:
        if (one := store.found(name, plan)) and one.outcome == "refused":
            reasons.setdefault(one.said.splitlines()[0], {}).setdefault(plan, []).append(name)
    who = {
        said: "; ".join(f"`{plan}`: {', '.join(names)}" for plan, names in of.items()) for said, of in reasons.items()
    }
    return "\n".join(
        [
            "# A zoo of jobs",
            "",
            f"{jobs} jobs as people write them, each [proven](../explanation/proof.md) against a plain PyTorch",
            f"loop on one device under {plans} plans. *Equal* to it; *refused* before any worker starts; *named*:",
            "another result, for a cause that is said before the run and that the proof gives as well. All else is",
            "in bold.",
            "",
            f"Of {len(shown)} cells {counts['equal']} are equal, {counts['refused']} refused, {counts['named']} named. "
            f"{right} are what they must be.",
            f"Written by `make zoo` with torch {store.torch}, {' and '.join(store.dates)}.",
            "",
            *grid.table(store),
            "",
            "## Why plans refuse",
            "",
            "| what is said | of |",
            "| --- | --- |",
            *(f"| {cell_text(said)} | {names} |" for said, names in who.items()),
            "",
        ]
    )


HERE = Path(__file__).resolve().parent
GRIDS = {
    "cases": Grid(cases=case_table.CASES, plans=case_table.PLANS, results=HERE / "cases.json", page=cases_page),
    "zoo": Grid(
        cases=zoo_table.ZOO,
        plans=zoo_table.PLANS,
        results=HERE / "zoo.json",
        page=zoo_page,
        lacking=lambda name: needs(*zoo_table.ZOO[name].needs),
    ),
}


def preload() -> None:
    """Import once what takes long, before cells fork."""
    import datasets  # noqa: F401
    import peft  # noqa: F401

    preload_libraries()


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("grid", choices=GRIDS)
    options.add_argument("page", type=Path)
    options.add_argument("--only", default="", help="jobs with this word")
    options.add_argument("--plan", default="", help="this plan only")
    options.add_argument("--jobs", type=int, default=2, help="cells at once")
    options.add_argument("--render", action="store_true", help="run nothing")
    asked = options.parse_args()
    return GRIDS[asked.grid].main(asked, preload if asked.grid == "zoo" else lambda: None)


if __name__ == "__main__":
    sys.exit(main())
