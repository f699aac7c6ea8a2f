"""The zoo: jobs × fourteen plans, each cell proven in a process of its own, and the page of what came.

``run_zoo.py PAGE [--only WORD] [--plan PLAN] [--jobs N] [--render]``, as of ``tests/cases/run_cases.py``. Exits with 1
where something else came than must.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "cases")]

from case_grid import Came, proven  # noqa: E402
from cell_processes import run  # noqa: E402
from zoo_table import PLANS, ZOO, fits, wrong  # noqa: E402

RESULTS = HERE / "results.json"
_ROOT = HERE.parents[1]

Store = dict[str, Any]  # "torch"; "cells": job → {"on": date, plan: fields of Came}


def work(name: str, plan: str, folder: Path) -> Came:
    """One cell."""
    return proven(ZOO[name].job, plan, ZOO[name].steps)


def stored(store: Store, name: str, plan: str) -> Came | None:
    """What came of a cell when it ran last."""
    told = store["cells"].get(name, {}).get(plan)
    if told is None:
        return None
    return Came(**{key: tuple(value) if isinstance(value, list) else value for key, value in told.items()})


def put(store: Store, name: str, plan: str, found: Came) -> None:
    """Store what came of a cell."""
    row = store["cells"].setdefault(name, {})
    row["on"] = datetime.date.today().isoformat()
    row[plan] = {**found.to_dict(), "said": re.sub(" at 0x[0-9a-f]+", "", found.said).replace(f"{_ROOT}/", "")}
    kept = [one for one in ZOO if one in store["cells"]]
    store["cells"] = {
        one: {key: store["cells"][one][key] for key in ("on", *PLANS) if key in store["cells"][one]} for one in kept
    }


def page(store: Store) -> str:
    """The page, from what is stored."""
    cells = {(name, plan): stored(store, name, plan) for name in ZOO for plan in PLANS}
    outcomes = [found.outcome for found in cells.values() if found]
    right = sum(1 for (name, plan), found in cells.items() if found and not wrong(ZOO[name], plan, found))
    counts = {word: outcomes.count(word) for word in ("equal", "refused", "unequal", "crashed", "hung", "stopped")}
    reasons: dict[str, dict[str, list[str]]] = {}
    for (name, plan), found in cells.items():
        if found and found.outcome == "refused":
            reasons.setdefault(_first(found.said), {}).setdefault(plan, []).append(name)
    dates = sorted({store["cells"][name]["on"] for name in store["cells"]})
    return "\n".join(
        [
            "# A zoo of jobs",
            "",
            f"{len(ZOO)} jobs as people write them, each [proven](../explanation/proof.md) against a plain PyTorch",
            f"loop on one device under {len(PLANS)} plans, or refused before any worker starts. All else is in bold.",
            "",
            f"Of {len(cells)} cells {counts['equal']} are equal and {counts['refused']} refused; {counts['unequal']} "
            f"differ, {counts['crashed']} crashed, {counts['hung']} hung, {counts['stopped']} stopped.",
            f"{right} are what they must be. Written by `make zoo` with torch {store['torch']}, {' and '.join(dates)}.",
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
            *(f"| {_cell(said)} | {_who(of)} |" for said, of in reasons.items()),
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


def _cell(words: str) -> str:
    return words.replace("|", "\\|").replace("<", "\\<").replace("*", "\\*").replace("_", "\\_")


def written(store: Store) -> str:
    """The store as text, a line a cell."""
    rows = []
    for name, row in store["cells"].items():
        inner = ",\n".join(f"      {json.dumps(key)}: {json.dumps(value)}" for key, value in row.items())
        rows.append(f"    {json.dumps(name)}: {{\n{inner}\n    }}")
    joined = ",\n".join(rows)
    return f'{{\n  "torch": {json.dumps(store["torch"])},\n  "cells": {{\n{joined}\n  }}\n}}\n'


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("page", type=Path)
    options.add_argument("--only", default="", help="jobs with this word")
    options.add_argument("--plan", default="", help="this plan only")
    options.add_argument("--jobs", type=int, default=2, help="cells at once")
    options.add_argument("--render", action="store_true", help="run nothing")
    asked = options.parse_args()
    where = asked.page.resolve()
    store: Store = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"torch": "", "cells": {}}
    if not asked.render:
        import datasets  # noqa: F401  # loaded once, before cells fork
        import peft  # noqa: F401
        import torch

        torch.set_num_threads(1)
        store["torch"] = torch.__version__
        cells = [(name, plan) for name in ZOO if asked.only in name for plan in PLANS if asked.plan in ("", plan)]
        for cell, one in run(cells, asked.jobs, work, lambda cell, one: wrong(ZOO[cell[0]], cell[1], one)):
            put(store, *cell, one)
            RESULTS.write_text(written(store))
    where.write_text(page(store))
    off = [
        (name, plan)
        for name in ZOO
        for plan in PLANS
        if (one := stored(store, name, plan)) is None or wrong(ZOO[name], plan, one)
    ]
    for cell in off:
        print(*cell, sep=", ", file=sys.stderr)
    return 1 if off and not asked.render else 0


if __name__ == "__main__":
    sys.exit(main())
