"""The table of ``resumed_law``, every plan that saved × every plan that goes on, as a page of the docs.

``write_resumed.py [--render] PAGE``. Measures all pairs (``make resumed``), stores what was measured beside this file
and writes the page from what is stored; ``--render`` only writes. Exits with 1 where a pair is not within its bound.
"""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from resumed_law import BOUND, FP32_BOUND, JOBS, ROWS, N, bound, difference, on_one_device, resumed, saved

from phalanx.errors import PhalanxError

RESULTS = Path(__file__).with_name("resumed.json")

Store = dict[str, Any]  # "on": date, "torch": version, "tables": job → plan that saved → plan that went on → difference


def measure() -> Store:
    """The largest difference of every pair."""
    torch.set_num_threads(1)
    tables: dict[str, dict[str, dict[str, float | str]]] = {}
    for name, plans in ROWS.items():
        job, rows = JOBS[name], tables.setdefault(name, {})
        one_device = on_one_device(job)
        for first in plans:
            row = rows.setdefault(first, {})
            with tempfile.TemporaryDirectory() as folder:
                run = saved(job, first, Path(folder) / "first")
                for at, then in enumerate(plans):
                    try:
                        row[then] = difference(resumed(job, then, run, Path(folder) / str(at)), one_device)
                    except PhalanxError as error:  # a table that stops at the first failure hides the others
                        print(f"{name}, {first}, then {then}: {error}", file=sys.stderr)
                        row[then] = "failed"
    return {"on": datetime.date.today().isoformat(), "torch": torch.__version__, "tables": tables}


def wrong(store: Store) -> list[str]:
    """The pairs that are missing or beyond their bound."""
    return [
        f"{name}: {first}, then {then}"
        for name, plans in ROWS.items()
        for first in plans
        for then in plans
        if not _within(store["tables"].get(name, {}).get(first, {}).get(then), first, then)
    ]


def _within(found: float | str | None, first: str, then: str) -> bool:
    return isinstance(found, float | int) and found <= bound(first, then)


def page(store: Store) -> Iterator[str]:
    """The page, line by line."""
    pairs = sum(len(plans) ** 2 for plans in ROWS.values())
    equal = pairs - len(wrong(store))
    yield "# Resume under any plan"
    yield ""
    yield (
        f"{N} steps under the plan of a row, a checkpoint, {N} more under the plan of a column: the weights are those "
        f"of {2 * N} steps of a plain PyTorch loop on one device. **{equal} of {pairs} pairs are.**"
    )
    yield ""
    yield (
        "Shown is the largest difference of any tensor, relative to its largest value. Models compute in double "
        "precision, so that any mistake (a step too many, a stale moment, samples out of turn) would stand out: "
        f"the bound is {BOUND:.0e}, and {FP32_BOUND:.0e} where replicas that step by themselves are averaged, which is "
        f"done in fp32. Measured on {store['on']} with torch {store['torch']}, on CPUs; `make resumed` writes it."
    )
    for name, plans in ROWS.items():
        yield ""
        yield f"## {name}"
        yield ""
        yield f"| saved under | {' | '.join(f'`{plan}`' for plan in plans)} |"
        yield f"| --- {'| --- ' * len(plans)}|"
        for first in plans:
            row = store["tables"].get(name, {}).get(first, {})
            yield f"| `{first}` | {' | '.join(_cell(row.get(then), first, then) for then in plans)} |"


def _cell(found: float | str | None, first: str, then: str) -> str:
    if found is None:
        return "not measured"
    shown = f"{found:.0e}" if isinstance(found, float | int) else found
    return shown if _within(found, first, then) else f"**{shown}**"


def main() -> int:
    """Measure unless told to render only; write the page."""
    (target,), render = [one for one in sys.argv[1:] if one != "--render"], "--render" in sys.argv[1:]
    if not render:
        RESULTS.write_text(json.dumps(measure(), indent=1) + "\n")
    store = json.loads(RESULTS.read_text())
    Path(target).write_text("\n".join(page(store)) + "\n")
    for pair in wrong(store):
        print(f"not within its bound: {pair}", file=sys.stderr)
    return 1 if wrong(store) else 0


if __name__ == "__main__":
    sys.exit(main())
