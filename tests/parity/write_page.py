"""The long parity table, every plan of ``table.LONG`` and ``table.SPLIT`` × every model, as a page of the docs.

``write_page.py PAGE [--only WORD] [--render]``. Measures (``make parity`` all of it, ``--only`` the plans with this
word), stores what was measured beside this file, and writes the page from what is stored; ``--render`` only writes.
Exits with 1 where the bar is missed, or where it measured and a cell is still not measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from models import BATCH, MODELS, plain
from table import APART, BAR, LONG, PLAIN_BAR, SHARES, SPLIT, STEPS

from phalanx.api import build
from phalanx.config import Job, Plan
from phalanx.errors import PhalanxError
from phalanx.verify import OneDevice

RESULTS = Path(__file__).with_name("results.json")
PLANS = [*(plan for plans in LONG.values() for plan in plans), *SPLIT]

TABLES = ("table", "shares", "apart")

# [loss, gradient]: the larger relative differences, and "unequal" after them where the proof says so; or a word.
Cell = list[Any] | str
Store = dict[str, Any]  # table → plan → {"on": date, "cells": {model: Cell}}; and "torch", "clipped"
Make = Callable[[Job], Job]


def cell(one: OneDevice, plan: str) -> Cell:
    """What the table shows for a model and a plan."""
    try:
        proof = one.prove(Plan.parse(plan))
    except PhalanxError as error:
        if getattr(error, "exit_code", 0) == 2:
            return "refused"  # nothing in this model to split so; the tests check the reasons
        # a table that stops at the first failure hides the others
        print(f"{one.job.name}, {plan}: {error}", file=sys.stderr)
        return "failed"
    found = [float(f"{proof.largest[name]:.2e}") for name in ("loss", "gradient")]
    near = plan != "single" or proof.largest["loss"] <= PLAIN_BAR
    return found if proof.equal and near else [*found, "unequal"]


def measure(store: Store, only: str) -> None:
    """Fill the tables of ``store`` with the plans that have the word ``only``."""
    torch.set_num_threads(1)
    store["torch"] = torch.__version__
    known = store.get("table", {})
    # What was never measured comes first, then what was longest ago: a run that is ended early was worth its time.
    plans = sorted((plan for plan in PLANS if only in plan), key=lambda plan: known.get(plan, {}).get("on", ""))
    ones = {name: OneDevice.run(make(), STEPS) for name, make in MODELS.items()} if plans else {}
    store["clipped"] = [name for name, make in MODELS.items() if _clips(make())]
    for plan in plans:
        _put(store, "table", plan, {name: cell(one, plan) for name, one in ones.items()})
        RESULTS.write_text(written(store))
    for table, rows, make in (("shares", SHARES, lambda job: job), ("apart", APART, plain)):
        for name, its in _asked(rows, only).items():
            one = OneDevice.run(make(MODELS[name]()), STEPS)
            for plan in its:
                _put(store, table, plan, {name: cell(one, plan)})


def page(store: Store) -> str:
    """The page, from what is stored."""
    cells = [_cell(store, "table", plan, name) for plan in PLANS for name in MODELS]
    shown = [found for found in cells if found != "not measured"]
    refused, good = shown.count("refused"), [max(found[:2]) for found in shown if _good(found)]
    rows = [
        f"| `{plan}` | " + " | ".join(_text(_cell(store, "table", plan, name)) for name in MODELS) + " |"
        for plan in PLANS
    ]
    return "\n".join(
        [
            "# Parity",
            "",
            f"Each job on one device against the same job under each plan, {STEPS} AdamW steps in fp32:",
            "the largest relative difference of a step's loss / of a parameter's first gradient.",
            "`single` is Phalanx on one device against [a plain PyTorch loop](../explanation/proof.md#the-plain-loop):",
            f"its losses differ by {PLAIN_BAR:.0e} at most.",
            f"The global batch is {BATCH}, so that shares and micro-batches are uneven. {_clipping(store)}",
            "The token counts of the language models differ by sample.",
            "",
            f"*refused*: the model has nothing to split so; {refused} of {len(shown)} are.",
            "",
            f"Of the others {len(good)} of {len(shown) - refused} are equal and within {BAR:.0e},",
            f"the largest being {max(good, default=0.0):.0e}." if good else "",
            f"Written by `make parity` with torch {store['torch']}, {_dates(store)}.",
            "",
            "| plan | " + " | ".join(MODELS) + " |",
            "| --- |" + " --- |" * len(MODELS),
            *rows,
            "",
            *_section(store, "shares", "Unequal shares", SHARES_SAID, SHARES),
            *_section(store, "apart", "Replicas that step by themselves", APART_SAID, APART),
        ]
    )


SHARES_SAID = ("The same jobs as above, with samples dealt out by weight, or by speed.",)
APART_SAID = (
    "Plain SGD without clipping, averaged after every step, is one device; after more steps, or with an optimizer",
    "that looks at more than one gradient, it is not, and `phalanx prove` says so.",
)


def _section(store: Store, table: str, title: str, said: Sequence[str], rows: Mapping[str, Sequence[str]]) -> list[str]:
    lines = [
        f"| `{plan}` | {name} | {_text(_cell(store, table, plan, name))} |"
        for name, plans in rows.items()
        for plan in plans
    ]
    return [f"## {title}", "", *said, "", "| plan | model | difference |", "| --- | --- | --- |", *lines, ""]


def _section(store: Store, table: str, title: str, said: Sequence[str], rows: Mapping[str, Sequence[str]]) -> list[str]:
    lines = [
        f"| `{plan}` | {name} | {_text(_cell(store, table, plan, name))} |"
        for name, plans in rows.items()
        for plan in plans
    ]
    return [f"## {title}", "", *said, "", "| plan | model | difference |", "| --- | --- | --- |", *lines, ""]


def _good(found: Cell) -> bool:
    return isinstance(found, list) and len(found) == 2 and max(found) <= BAR


def _text(found: Cell) -> str:
    if isinstance(found, str):
        return "**failed**" if found == "failed" else found
    text = f"{found[0]:.0e} / {found[1]:.0e}"
    return text if _good(found) else f"**{text}**"


def _clipping(store: Store) -> str:
    without = [name for name in MODELS if name not in store["clipped"]]
    which = f"all models but {' and '.join(without)}" if without else "all models"
    return f"Gradients of {which} are clipped."


def _clips(job: Job) -> bool:
    """Whether some step's gradient is longer than the norm that it is clipped to."""
    step, loader = build(job, Plan())
    norms = [step(batch).grad_norm for batch in loader]
    return job.clip is not None and any(norm is not None and norm > job.clip for norm in norms)


def _dates(store: Store) -> str:
    found = sorted(row["on"] for table in TABLES for row in store[table].values())
    return ", ".join(f"{found.count(date)} plans on {date}" for date in dict.fromkeys(found))


def _cell(store: Store, table: str, plan: str, name: str) -> Cell:
    return store[table].get(plan, {"cells": {}})["cells"].get(name, "not measured")


def _put(store: Store, table: str, plan: str, cells: Mapping[str, Cell]) -> None:
    row = store[table].setdefault(plan, {"cells": {}})
    row["on"] = datetime.date.today().isoformat()
    row["cells"].update(cells)
    print(table, plan, *(_text(found) for found in cells.values()), sep="  ", flush=True)


def _asked(rows: Mapping[str, Sequence[str]], only: str) -> dict[str, list[str]]:
    found = {name: [plan for plan in plans if only in plan] for name, plans in rows.items()}
    return {name: plans for name, plans in found.items() if plans}


def _all(store: Store) -> Iterator[Cell]:
    for plan in PLANS:
        yield from (_cell(store, "table", plan, name) for name in MODELS)
    for table, rows in (("shares", SHARES), ("apart", APART)):
        yield from (_cell(store, table, plan, name) for name, plans in rows.items() for plan in plans)


def written(store: Store) -> str:
    """The store as text, a line a plan, so that a difference between two runs can be read."""
    head = {name: store[name] for name in ("torch", "clipped")}
    tables = []
    for name in TABLES:
        rows = ",\n".join(f"    {json.dumps(plan)}: {json.dumps(row)}" for plan, row in store[name].items())
        tables.append(f"  {json.dumps(name)}: {{\n{rows}\n  }}")
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    return "{\n" + ",\n".join([*lines, *tables]) + "\n}\n"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("page", type=Path)
    options.add_argument("--only", default="", help="plans with this word")
    options.add_argument("--render", action="store_true", help="measure nothing")
    asked = options.parse_args()
    store: Store = json.loads(RESULTS.read_text())
    if not asked.render:
        measure(store, asked.only)
        RESULTS.write_text(written(store))
    asked.page.write_text(page(store))
    passes = ("refused", "not measured") if asked.render else ("refused",)
    return 0 if all(found in passes or _good(found) for found in _all(store)) else 1


if __name__ == "__main__":
    sys.exit(main())
