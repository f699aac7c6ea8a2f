"""The grids of jobs × plans: a cell is proven in a process of its own, what came is stored, and a page shows it."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from case_table import Case, Expected

import phalanx as px
from phalanx.errors import PhalanxError, SpecError, WorkerError
from phalanx.launch.worker_pool import WorkerPool


@dataclass(frozen=True, kw_only=True, slots=True)
class Came:
    """What came of a cell.

    Attributes:
        outcome: ``equal``, ``unequal``, ``refused`` (before workers started), ``stopped`` (the run ended with an error
            of Phalanx's own), ``crashed``, or ``hung``.
        said: the cause, the refusal or the error, in words.
        before: what was said before the run.
        where: the fields that a refusal names.
    """

    outcome: str
    said: str = ""
    before: tuple[str, ...] = ()
    where: tuple[str, ...] = ()

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Self:
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in told.items()})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def came(name: str, one: Case, plan: str, folder: Path, steps: int | None = None) -> Came:
    return proven(one.job, plan, steps or one.steps) if one.job else looped(name, plan, folder)


def looped(name: str, plan: str, folder: Path) -> Came:
    """Run a loop of one's own on two ranks of torchrun."""
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = str(Path(__file__).with_name("own_loop.py"))
    done = subprocess.run([*torchrun, script, name, plan], capture_output=True, text=True, cwd=folder)
    if done.returncode:
        return Came(outcome="crashed", said=done.stderr.strip()[-2000:])
    told = json.loads(done.stdout.strip().splitlines()[-1])
    if "refused" in told:
        return Came(outcome="refused", said=told["refused"], where=tuple(told["where"]))
    far = max(abs(one - other) / abs(other) for one, other in zip(told["found"], told["plain"], strict=True))
    near = math.isfinite(far) and far <= WITHIN
    return Came(outcome="equal" if near else "unequal", said="" if near else f"numbers differ by {far:.2g}")


WITHIN = 1e-4
"""Relative difference of numbers after a few steps of Adam: rounding of 6e-8, as often amplified as there are steps."""


def proven(make: Callable[[], px.Job], plan: str, steps: int | None = None) -> Came:
    """Prove the job that ``make`` gives under ``plan``."""
    before: list[str] = []
    with _starts() as started:
        try:
            job = make()
            proof = px.prove(job, plan, steps=steps or job.steps or 4, say=before.append)
        except SpecError as error:
            return Came(
                outcome="stopped" if started else "refused",
                said=str(error),
                before=tuple(before),
                where=tuple(one.where for one in error.problems),
            )
        except WorkerError as error:
            crashed = bool(error.traceback) and error.traceback in str(error)
            return Came(outcome="crashed" if crashed else "stopped", said=str(error), before=tuple(before))
        except PhalanxError as error:
            return Came(outcome="stopped" if started else "refused", said=str(error), before=tuple(before))
        except Exception as error:
            return Came(outcome="crashed", said=f"{type(error).__name__}: {error}", before=tuple(before))
    return Came(outcome="equal" if proof.equal else "unequal", said=proof.cause, before=tuple(before))


def wrong(expected: Expected, found: Came) -> str:
    """In which way ``found`` is not what must come; empty where it is."""
    against = [note for note in found.before if not note.startswith(_HARMLESS)]
    said = found.before
    match expected.outcome:
        case "equal":
            right = found.outcome == "equal" and not against
        case "named" | "near":
            right = any(note.startswith(expected.words) for note in said)
            right &= found.said.startswith(expected.words) if found.outcome == "unequal" else expected.outcome == "near"
            right &= found.outcome in ("equal", "unequal")
        case _:
            right = found.outcome == expected.outcome and expected.words in found.said
            right &= not expected.where or expected.where in found.where
    if right:
        return ""
    words = f" ({expected.where} {expected.words})".replace("( ", "(") if expected.words or expected.where else ""
    return f"{expected.outcome}{words} must come, and {found.outcome} came: {found.said} {list(found.before)}"


_HARMLESS = (
    "dropout is switched off",
    "BatchNorm takes statistics of each micro-batch and is not equal when one is split",
)
"""What is said of a job under every plan."""


@contextmanager
def _starts() -> Iterator[list[bool]]:
    started: list[bool] = []
    start: Callable[[WorkerPool], None] = WorkerPool.start

    def noted(self: WorkerPool) -> None:
        started.append(True)
        start(self)

    WorkerPool.start = noted
    try:
        yield started
    finally:
        WorkerPool.start = start


PATIENCE = 120.0
"""Seconds for a cell, of which each needs a few; one that takes longer hangs."""

Cell = tuple[str, str]  # a job's name, and a plan


@dataclass(slots=True)
class _Process:
    pid: int
    answer: Path
    began: float


def started(name: str, one: Case, plan: str, folder: Path) -> _Process:
    """A process in a group of its own that works on one cell."""
    answer = folder / f"{abs(hash((name, plan)))}.json"
    pid = os.fork()
    if pid:
        return _Process(pid, answer, time.monotonic())
    try:
        os.setsid()
        sink = os.open(answer.with_suffix(".log"), os.O_CREAT | os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        answer.write_text(json.dumps(came(name, one, plan, folder).to_dict()))
    finally:
        os._exit(0)


def ended(process: _Process) -> Came | None:
    pid, status = os.waitpid(process.pid, os.WNOHANG)
    if pid == 0 and time.monotonic() - process.began < PATIENCE:
        return None
    if pid == 0:
        os.killpg(process.pid, signal.SIGKILL)
        os.waitpid(process.pid, 0)
        return Came(outcome="hung", said=f"no end within {PATIENCE:.0f} s")
    if not process.answer.exists():
        return Came(outcome="crashed", said=f"ended with status {status}")
    return Came.of(json.loads(process.answer.read_text()))


def run(cells: Sequence[Cell], at_once: int, cases: Mapping[str, Case]) -> Iterator[tuple[Cell, Came]]:
    running: dict[Cell, _Process] = {}
    waiting = list(cells)[::-1]
    with tempfile.TemporaryDirectory(prefix="phalanx-cases-") as folder:
        os.chdir(folder)
        while waiting or running:
            while waiting and len(running) < at_once:
                name, plan = cell = waiting.pop()
                running[cell] = started(name, cases[name], plan, Path(folder))
            for cell, process in list(running.items()):
                one = ended(process)
                if one is not None:
                    del running[cell]
                    yield cell, one
                    seconds = time.monotonic() - process.began
                    verdict = wrong(cases[cell[0]].expected[cell[1]], one) or "as it must"
                    print(f"{seconds:5.1f} s  {cell[0]}, {cell[1]}: {one.outcome}; {verdict}", flush=True)
            time.sleep(0.05)


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
    """Jobs × plans, the file of its store, and the page of what is stored.

    ``lacking``: why a job cannot run here; empty where it can. What came of it elsewhere stays stored.
    """

    cases: Mapping[str, Case]
    plans: Sequence[str]
    results: Path
    page: Callable[[Grid, Store], str]
    lacking: Callable[[str], str] = lambda name: ""

    @property
    def cells(self) -> list[Cell]:
        return [(name, plan) for name in self.cases for plan in self.plans]

    def right(self, store: Store, name: str, plan: str) -> bool:
        """Whether what is stored of a cell is what must come."""
        one = store.found(name, plan)
        return one is not None and not wrong(self.cases[name].expected[plan], one)

    def text(self, store: Store, name: str, plan: str) -> str:
        """A cell of the table: what had to come, in bold what else came."""
        if (one := store.found(name, plan)) is None:
            return "not run"
        return self.cases[name].expected[plan].outcome if self.right(store, name, plan) else f"**{one.outcome}**"

    def table(self, store: Store) -> list[str]:
        head = "| job | shows | " + " | ".join(f"`{plan}`" for plan in self.plans) + " |"
        rows = (
            [name, one.shows, *(self.text(store, name, plan) for plan in self.plans)]
            for name, one in self.cases.items()
        )
        return [head, "| --- | --- |" + " --- |" * len(self.plans), *(f"| {' | '.join(row)} |" for row in rows)]

    def main(self, asked: argparse.Namespace, preload: Callable[[], object]) -> int:
        """Run what is asked for, and write the page. Gives 1 where something else came than must.

        ``preload`` imports what the processes of cells share.
        """
        where, store = asked.page.resolve(), Store.read(self.results)
        if not asked.render:
            import torch

            preload()
            torch.set_num_threads(1)
            store.torch = torch.__version__
            for cell, one in run(self._chosen(asked.only, asked.plan), asked.jobs, self.cases):
                store.put(*cell, one)
                store.write(self.results, list(self.cases), self.plans)
        where.write_text(self.page(self, store))
        off = [cell for cell in self.cells if not self.right(store, *cell)]
        for cell in off:
            print(*cell, sep=", ", file=sys.stderr)
        return 1 if off and not asked.render else 0

    def _chosen(self, only: str, plan: str) -> list[Cell]:
        """Those that are asked for and can run here; says why others cannot."""
        asked = [name for name in self.cases if only in name]
        lacking = {name: why for name in asked if (why := self.lacking(name))}
        for name, why in lacking.items():
            print(f"skipped  {name}: {why}", flush=True)
        return [cell for cell in self.cells if cell[0] in asked and cell[0] not in lacking and plan in ("", cell[1])]


def cell_text(words: str) -> str:
    """Words in a cell of a table, where they mean nothing but themselves."""
    lines = " ".join(words.split())
    return lines.replace("|", "\\|").replace("<", "\\<").replace("*", "\\*").replace("_", "\\_")
