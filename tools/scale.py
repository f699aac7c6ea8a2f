"""Measures what grows with the ranks of a run, and writes the tables of ``docs/explanation/scale.md``.

``python tools/scale.py PAGE [--only WORD] [--render]``. Counts every law of ``scale_laws.LAWS`` in worlds of 1,024,
16,384 and 131,072 ranks that are not there, and measures 1, 8 and 64 real processes (``make scale``: about ten
minutes); ``--only`` those with this word in their name. What was measured is stored beside this file, and the page is
written from what is stored; ``--render`` only writes. Exits with 1 where a law does not hold.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scale_costs import Cost
from scale_laws import LAWS, WORLDS, Law, broken, exponent
from scale_processes import MEASURED, PROCESSES

HERE = Path(__file__).resolve().parent
PAGE, RESULTS = HERE.parent / "docs" / "explanation" / "scale.md", HERE / "scale.json"

Store = dict[str, Any]


def measure(store: Store, only: str) -> list[str]:
    """Fill ``store``. Returns what of the laws does not hold."""
    wrong: list[str] = []
    for law in LAWS:
        if only not in law.name:
            continue
        costs = [law.cost(world) for world in WORLDS]
        store.setdefault("laws", {})[law.name] = [cost.to_dict() for cost in costs]
        wrong += broken(law, WORLDS, costs)
        print(law.name, *store["laws"][law.name], flush=True)
        RESULTS.write_text(written(store))
    if only in "processes":
        for count in PROCESSES:  # each in processes of its own: what a run leaves in one is not measured with the next
            argv = [sys.executable, str(HERE / "scale_processes.py"), str(count)]
            found = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
            store.setdefault("processes", {})[str(count)] = json.loads(found)
            print(count, found, flush=True)
            RESULTS.write_text(written(store))
    store["on"] = datetime.date.today().isoformat()
    RESULTS.write_text(written(store))
    return wrong


def written(store: Store) -> str:
    """What was measured, as it is stored."""
    return json.dumps(store, indent=1, sort_keys=True) + "\n"


def laws_table(store: Store) -> str:
    """Every law with what was counted in each world."""
    rows = [
        f"| what | in | law | {' | '.join(f'{world:,} ranks' for world in WORLDS)} | exponent |",
        f"| --- | --- | --- |{' ---: |' * (len(WORLDS) + 1)}",
    ]
    for law in LAWS:
        costs = [Cost(**cost) for cost in store["laws"].get(law.name, [])]
        if costs:
            cells = " | ".join(_shown(law, cost) for cost in costs)
            mark = " ¹" if law.above else ""
            rows.append(f"| {law.what}{mark} | {law.where} | {law.law} | {cells} | {_exponents(costs)} |")
    return "\n".join(rows)


def _shown(law: Law, cost: Cost) -> str:
    if cost.count:
        return f"{cost.count:,}" if law.what.startswith("bytes") else f"{cost.count:,} {law.counts}"
    return f"{cost.operations:,} op., {_bytes(cost.bytes)}"


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _exponents(costs: Sequence[Cost]) -> str:
    values = ([getattr(cost, unit) for cost in costs] for unit in ("operations", "bytes", "count"))
    found = [f"{exponent(WORLDS, one) + 0.0:.2f}".replace("-0.00", "0.00") for one in values if any(one)]
    return ", ".join(found)


def processes_table(store: Store) -> str:
    """What was measured with processes."""
    counts = [count for count in PROCESSES if str(count) in store.get("processes", {})]
    rows = [
        f"| what | in | law | {' | '.join(f'{count}' for count in counts)} | exponent, from {counts[1]} on |",
        f"| --- | --- | --- |{' ---: |' * (len(counts) + 1)}",
    ]
    for one in MEASURED:
        values = [store["processes"][str(count)][one.name] for count in counts]
        cells = " | ".join(
            f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}" for value in values
        )
        power = exponent(counts[1:], [1e6 * value for value in values[1:]])
        rows.append(f"| {one.what}{' ²' if one.above else ''} | {one.where} | {one.law} | {cells} | {power:.2f} |")
    notes = [f"² Above its law: {one.above}." for one in MEASURED if one.above]
    return "\n".join([*rows, "", *notes])


def above(store: Store) -> str:
    """What grows faster than the bar allows, and stays so."""
    return "\n".join(f"- {law.what}: {law.above}." for law in LAWS if law.above)


TABLES = {"laws": laws_table, "processes": processes_table, "above": above}


def page(text: str, store: Mapping[str, Any]) -> str:
    """``text`` with its tables as ``store`` has them."""
    for name, table in TABLES.items():
        start, end = f"<!-- generated: {name} -->\n", "<!-- end -->"
        head, found, rest = text.partition(start)
        _, closed, tail = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"no line {start.strip()!r} with a line {end!r} after it")
        text = f"{head}{start}\n{table(dict(store))}\n\n{end}{tail}"
    return text


def _lines(problems: Sequence[str]) -> Iterator[str]:
    yield from (f"a law does not hold: {one}" for one in problems)


def main() -> int:
    """Measure, store and write."""
    parser = argparse.ArgumentParser(description="Measures what grows with the ranks of a run.")
    parser.add_argument("page", type=Path, nargs="?", default=PAGE)
    parser.add_argument("--only", default="", help="measure what has this word in its name")
    parser.add_argument("--render", action="store_true", help="write the page from what is stored")
    given = parser.parse_args()
    store: Store = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    wrong = [] if given.render else measure(store, given.only)
    given.page.write_text(page(PAGE.read_text(), store))
    print("\n".join(_lines(wrong)), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
