"""The zoo: jobs × fourteen plans, each cell proven in a process of its own, and the page of what came.

``run_zoo.py PAGE [--only WORD] [--plan PLAN] [--jobs N] [--render]``, as of ``tests/cases/run_cases.py``. Exits with 1
where something else came than must.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "cases")]

from grid import Came, Grid, Store, cell_text, proven  # noqa: E402
from zoo_libraries import needs, preload_libraries  # noqa: E402
from zoo_table import PLANS, ZOO, fits, wrong  # noqa: E402


def work(name: str, plan: str, folder: Path) -> Came:
    """One cell."""
    return proven(ZOO[name].job, plan, ZOO[name].steps)


def page(store: Store) -> str:
    """The page, from what is stored."""
    cells = {(name, plan): store.found(name, plan) for name in ZOO for plan in PLANS}
    right = sum(1 for (name, plan), found in cells.items() if found and not wrong(ZOO[name], plan, found))
    shown = [_text(name, plan, found) for (name, plan), found in cells.items()]
    counts = {word: shown.count(word) for word in ("equal", "named", "refused")}
    reasons: dict[str, dict[str, list[str]]] = {}
    for (name, plan), found in cells.items():
        if found and found.outcome == "refused":
            reasons.setdefault(_first(found.said), {}).setdefault(plan, []).append(name)
    return "\n".join(
        [
            "# A zoo of jobs",
            "",
            f"{len(ZOO)} jobs as people write them, each [proven](../explanation/proof.md) against a plain PyTorch",
            f"loop on one device under {len(PLANS)} plans. *Equal* to it; *refused* before any worker starts; *named*:",
            "another result, for a cause that is said before the run and that the proof gives as well. All else is",
            "in bold.",
            "",
            f"Of {len(cells)} cells {counts['equal']} are equal, {counts['refused']} refused, {counts['named']} named. "
            f"{right} are what they must be.",
            f"Written by `make zoo` with torch {store.torch}, {' and '.join(store.dates)}.",
            "",
            "| job | shows | " + " | ".join(f"`{plan}`" for plan in PLANS) + " |",
            "| --- | --- |" + " --- |" * len(PLANS),
            *(
                f"| {name} | {ZOO[name].shows} | "
                + " | ".join(_text(name, plan, cells[name, plan]) for plan in PLANS)
                + " |"
                for name in ZOO
            ),
            "",
            "## Why plans refuse",
            "",
            "| what is said | of |",
            "| --- | --- |",
            *(f"| {cell_text(said)} | {_who(of)} |" for said, of in reasons.items()),
            "",
        ]
    )


def _text(name: str, plan: str, found: Came | None) -> str:
    if found is None:
        return "not run"
    if wrong(ZOO[name], plan, found):
        return f"**{found.outcome}**"
    return "named" if fits(ZOO[name].named, plan) else found.outcome


def _first(said: str) -> str:
    """The first problem of a refusal, without the line to copy; numbers and names of layers differ from job to job."""
    return said.splitlines()[0]


def _who(of: dict[str, list[str]]) -> str:
    return "; ".join(f"`{plan}`: {', '.join(names)}" for plan, names in of.items())


def _preload() -> None:
    """Import once what takes long, before cells fork."""
    import datasets  # noqa: F401
    import peft  # noqa: F401

    preload_libraries()


GRID = Grid(
    names=list(ZOO),
    plans=PLANS,
    results=HERE / "results.json",
    work=work,
    judge=lambda cell, one: wrong(ZOO[cell[0]], cell[1], one),
    page=page,
    lacking=lambda name: needs(*ZOO[name].needs),
)

if __name__ == "__main__":
    sys.exit(GRID.main(__doc__, _preload))
