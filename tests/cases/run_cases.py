"""The grid of jobs × plans: each cell in a process of its own, with a limit of time, and the page of what came.

``run_cases.py PAGE [--only WORD] [--plan PLAN] [--jobs N] [--render]``. Runs the cases with the word (``make cases``
all), stores what came beside this file, and writes the page from what is stored; ``--render`` only writes. Exits with 1
where something else came than must.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from case_grid import Came, came, wrong
from case_loops import LOOPS, looped
from case_table import CASES, PLANS
from cell_processes import run

RESULTS = Path(__file__).with_name("results.json")
_ROOT = Path(__file__).resolve().parents[2]
Store = dict[str, Any]  # "torch"; "cells": case → {"on": date, plan: fields of Came}


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
    cells = {(name, plan): _stored(store, name, plan) for name in shows() for plan in PLANS}
    right = sum(1 for cell, found in cells.items() if found and not wrong(expected(*cell), found))
    counts = {word: sum(1 for found in cells.values() if found and found.outcome == word) for word in _COUNTED}
    rows = [
        f"| {name} | {words} | " + " | ".join(_text(name, plan, cells[name, plan]) for plan in PLANS) + " |"
        for name, words in shows().items()
    ]
    said = [
        f"| {name} | {_cell(words)} |" for name in shows() for words in _said([cells[name, plan] for plan in PLANS])
    ]
    dates = sorted({store["cells"][name]["on"] for name in store["cells"]})
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
            f"Written by `make cases` with torch {store['torch']}, {' and '.join(dates)}.",
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


def _stored(store: Store, name: str, plan: str) -> Came | None:
    told = store["cells"].get(name, {}).get(plan)
    if told is None:
        return None
    return Came(**{key: tuple(value) if isinstance(value, list) else value for key, value in told.items()})


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


def _cell(words: str) -> str:
    lines = " ".join(words.split())
    return lines.replace("|", "\\|").replace("<", "\\<").replace("*", "\\*").replace("_", "\\_")


def written(store: Store) -> str:
    """The store as text, a line a cell."""
    rows = []
    for name, row in store["cells"].items():
        inner = ",\n".join(f"      {json.dumps(key)}: {json.dumps(value)}" for key, value in row.items())
        rows.append(f"    {json.dumps(name)}: {{\n{inner}\n    }}")
    joined = ",\n".join(rows)
    return f'{{\n  "torch": {json.dumps(store["torch"])},\n  "cells": {{\n{joined}\n  }}\n}}\n'


def _put(store: Store, name: str, plan: str, found: Came) -> None:
    cells = store["cells"]
    row = cells.setdefault(name, {})
    row["on"] = datetime.date.today().isoformat()
    row[plan] = {**found.to_dict(), "said": re.sub(" at 0x[0-9a-f]+", "", found.said).replace(f"{_ROOT}/", "")}
    store["cells"] = {
        name: {key: cells[name][key] for key in ("on", *PLANS) if key in cells[name]}
        for name in shows()
        if name in cells
    }


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("page", type=Path)
    options.add_argument("--only", default="", help="cases with this word")
    options.add_argument("--plan", default="", help="this plan only")
    options.add_argument("--jobs", type=int, default=2, help="cells at once")
    options.add_argument("--render", action="store_true", help="run nothing")
    asked = options.parse_args()
    where = asked.page.resolve()
    store: Store = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"torch": "", "cells": {}}
    if not asked.render:
        import torch

        torch.set_num_threads(1)
        store["torch"] = torch.__version__
        cells = [(name, plan) for name in shows() if asked.only in name for plan in PLANS if asked.plan in ("", plan)]
        for cell, one in run(cells, asked.jobs, work, lambda cell, one: wrong(expected(*cell), one)):
            _put(store, *cell, one)
            RESULTS.write_text(written(store))
    where.write_text(page(store))
    cells = [(name, plan) for name in shows() for plan in PLANS]
    off = [cell for cell in cells if (one := _stored(store, *cell)) is None or wrong(expected(*cell), one)]
    for cell in off:
        print(*cell, sep=", ", file=sys.stderr)
    return 1 if off and not asked.render else 0


if __name__ == "__main__":
    sys.exit(main())
