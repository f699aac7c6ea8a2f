"""Cells of a grid of jobs × plans, each in a process of its own, with a limit of time."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from case_grid import Came

PATIENCE = 120.0
"""Seconds for a cell, of which each needs a few; one that takes longer hangs."""

Cell = tuple[str, str]  # a job's name, and a plan
Work = Callable[[str, str, Path], Came]


@dataclass(slots=True)
class _Process:
    pid: int
    answer: Path
    began: float


def started(work: Work, name: str, plan: str, folder: Path) -> _Process:
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
        answer.write_text(json.dumps(work(name, plan, folder).to_dict()))
    finally:
        os._exit(0)


def ended(process: _Process) -> Came | None:
    """What came; ``None`` while it runs."""
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


def run(
    cells: Sequence[Cell], at_once: int, work: Work, judge: Callable[[Cell, Came], str]
) -> Iterator[tuple[Cell, Came]]:
    """Each cell with what came of it, as they end; ``judge`` says in which way that is wrong, if it is."""
    running: dict[Cell, _Process] = {}
    waiting = list(cells)[::-1]
    with tempfile.TemporaryDirectory(prefix="phalanx-cases-") as name:
        os.chdir(name)
        while waiting or running:
            while waiting and len(running) < at_once:
                cell = waiting.pop()
                running[cell] = started(work, *cell, Path(name))
            for cell, process in list(running.items()):
                one = ended(process)
                if one is not None:
                    del running[cell]
                    yield cell, one
                    seconds = time.monotonic() - process.began
                    verdict = judge(cell, one) or "as it must"
                    print(f"{seconds:5.1f} s  {cell[0]}, {cell[1]}: {one.outcome}; {verdict}", flush=True)
            time.sleep(0.05)
