"""What came of the cells of a grid of jobs × plans, stored beside its table; and the command that runs them."""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from case_grid import Came
from cell_processes import Cell, Work, run

_ROOT = Path(__file__).resolve().parents[2]


@dataclass(slots=True)
class Store:
    """What came when each cell ran last.

    Attributes:
        torch: the version that the last of them ran with.
        cells: job → ``{"on": date, plan: fields of Came}``.
    """

    torch: str = ""
    cells: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    @classmethod
    def read(cls, path: Path) -> Self:
        """What ``path`` has; nothing where there is no such file."""
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    @property
    def dates(self) -> list[str]:
        """The days on which cells ran."""
        return sorted({row["on"] for row in self.cells.values()})

    def found(self, name: str, plan: str) -> Came | None:
        """What came of a cell; ``None`` where it has not run."""
        told = self.cells.get(name, {}).get(plan)
        return None if told is None else Came.of(told)

    def put(self, name: str, plan: str, came: Came) -> None:
        """Note what came of a cell, without addresses and folders of this machine."""
        row = self.cells.setdefault(name, {})
        row["on"] = datetime.date.today().isoformat()
        row[plan] = {**came.to_dict(), "said": re.sub(" at 0x[0-9a-f]+", "", came.said).replace(f"{_ROOT}/", "")}

    def write(self, path: Path, names: Sequence[str], plans: Sequence[str]) -> None:
        """Write the jobs ``names`` and their ``plans`` in this order, a line a cell."""
        rows = []
        for name in (one for one in names if one in self.cells):
            row = {key: self.cells[name][key] for key in ("on", *plans) if key in self.cells[name]}
            inner = ",\n".join(f"      {json.dumps(key)}: {json.dumps(value)}" for key, value in row.items())
            rows.append(f"    {json.dumps(name)}: {{\n{inner}\n    }}")
        joined = ",\n".join(rows)
        path.write_text(f'{{\n  "torch": {json.dumps(self.torch)},\n  "cells": {{\n{joined}\n  }}\n}}\n')


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Jobs × plans.

    Attributes:
        results: the file of its store.
        work: what is done in a cell, in a process of its own.
        judge: in which way what came of a cell is wrong; empty where it is not.
        page: the page of what is stored.
        lacking: why a job cannot run here; empty where it can. What came of it elsewhere stays stored.
    """

    names: Sequence[str]
    plans: Sequence[str]
    results: Path
    work: Work
    judge: Callable[[Cell, Came], str]
    page: Callable[[Store], str]
    lacking: Callable[[str], str] = lambda name: ""

    def main(self, about: str | None, preload: Callable[[], object] = lambda: None) -> int:
        """Run what the command line asks for, and write the page. Gives 1 where something else came than must.

        ``preload`` imports what the processes of cells share.
        """
        asked = _asked(about)
        where = asked.page.resolve()
        store = Store.read(self.results)
        if not asked.render:
            import torch

            preload()
            torch.set_num_threads(1)
            store.torch = torch.__version__
            for cell, came in run(self._cells(asked.only, asked.plan), asked.jobs, self.work, self.judge):
                store.put(*cell, came)
                store.write(self.results, self.names, self.plans)
        where.write_text(self.page(store))
        off = [cell for cell in self._all() if (one := store.found(*cell)) is None or self.judge(cell, one)]
        for cell in off:
            print(*cell, sep=", ", file=sys.stderr)
        return 1 if off and not asked.render else 0

    def _all(self) -> list[Cell]:
        return [(name, plan) for name in self.names for plan in self.plans]

    def _cells(self, only: str, plan: str) -> list[Cell]:
        """Those that are asked for and can run here; says why others cannot."""
        asked = [name for name in self.names if only in name]
        lacking = {name: why for name in asked if (why := self.lacking(name))}
        for name, why in lacking.items():
            print(f"skipped  {name}: {why}", flush=True)
        return [cell for cell in self._all() if cell[0] in asked and cell[0] not in lacking and plan in ("", cell[1])]


def _asked(about: str | None) -> argparse.Namespace:
    options = argparse.ArgumentParser(description=about)
    options.add_argument("page", type=Path)
    options.add_argument("--only", default="", help="jobs with this word")
    options.add_argument("--plan", default="", help="this plan only")
    options.add_argument("--jobs", type=int, default=2, help="cells at once")
    options.add_argument("--render", action="store_true", help="run nothing")
    return options.parse_args()


def cell_text(words: str) -> str:
    """Words in a cell of a table, where they mean nothing but themselves."""
    lines = " ".join(words.split())
    return lines.replace("|", "\\|").replace("<", "\\<").replace("*", "\\*").replace("_", "\\_")
