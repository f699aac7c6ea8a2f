"""Puts one fault after another into a copy of the code, and reports which check finds it.

``run_mutants.py [--page PAGE] [--only WORD] [--jobs N]``. Every check first passes on the code as it is. Each mutation
runs in a process forked from one that has torch loaded, with a copy of ``src`` first on its path. Exits with 1 where a
fault is not found, cannot run at all, or its text is no longer in the code; ``make mutants`` writes the page of all.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from mutation import CANNOT_RUN, SOURCE, Mutation


def _listed() -> Iterator[Mutation]:
    """The mutations of each file ``mutations*.py`` of this folder."""
    for path in sorted(Path(__file__).parent.glob("mutations*.py")):
        for value in vars(import_module(path.stem)).values():
            if isinstance(value, tuple):
                yield from (one for one in value if isinstance(one, Mutation))


ALL = tuple(_listed())
KERNEL = sorted({words for one in ALL for words in one.checks if not words.startswith("test ")})
_PATIENCE = 300.0  # seconds for the checks of one mutation; one that hangs is found, too


@dataclass(frozen=True, slots=True)
class Found:
    """What a process told.

    Attributes:
        check: the first that failed; empty where none did.
        words: what it said.
    """

    check: str
    words: str


def judged(found: Found) -> Found:
    """Nothing, where the check only failed as the text put into the code cannot run."""
    return Found("", f"an error of the list, no find: {found.words}") if re.search(CANNOT_RUN, found.words) else found


@dataclass(slots=True)
class _Process:
    pid: int
    answer: Path
    began: float


def inside(package: Path, checks: Sequence[str], answer: Path) -> None:
    """The work of a forked process: the checks, with the code in ``package``, until one fails."""
    os.setsid()
    sys.path.insert(0, str(package.parent))
    os.environ["PYTHONPATH"] = str(package.parent)
    sink = os.open(answer.with_suffix(".log"), os.O_CREAT | os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    found = Found("", "")
    for words in checks:
        try:
            from mutant_checks import check

            import phalanx

            assert Path(str(phalanx.__file__)).parent == package, phalanx.__file__
            wrong = check(words)
        except BaseException as error:  # a crash is found, too
            traceback.print_exc()
            wrong = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        if wrong:
            found = Found(words, wrong)
            break
    answer.write_text(json.dumps([found.check, found.words]))


def started(package: Path, checks: Sequence[str], answer: Path) -> _Process:
    pid = os.fork()
    if pid == 0:
        try:
            inside(package, checks, answer)
        finally:
            os._exit(0)
    return _Process(pid, answer, time.monotonic())


def ended(process: _Process, checks: Sequence[str]) -> Found | None:
    """Its answer; ``None`` while it runs."""
    pid, _ = os.waitpid(process.pid, os.WNOHANG)
    late = time.monotonic() - process.began > _PATIENCE
    if pid == 0 and not late:
        return None
    if pid == 0:
        os.killpg(process.pid, signal.SIGKILL)
        os.waitpid(process.pid, 0)
        return Found(checks[0], f"no end within {_PATIENCE:.0f} s")
    if not process.answer.exists():
        return Found(checks[0], "the process died")
    check, words = json.loads(process.answer.read_text())
    return Found(check, words)


def run(tasks: Sequence[tuple[Mutation | None, tuple[str, ...]]], folder: Path, at_once: int) -> list[Found]:
    """What is found of each task: a mutation, or the code as it is, and checks."""
    base = folder / "base" / "phalanx"
    if not base.exists():
        shutil.copytree(SOURCE, base, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(str(base), quiet=2)
    answers: list[Found | None] = [None] * len(tasks)
    running: dict[int, _Process] = {}
    waiting = list(range(len(tasks)))[::-1]
    while waiting or running:
        while waiting and len(running) < at_once:
            index = waiting.pop()
            mutation, checks = tasks[index]
            where = Path(tempfile.mkdtemp(dir=folder))
            shutil.copytree(base, where / "phalanx", copy_function=os.link)
            if mutation is not None:
                mutation.put_into(where / "phalanx")
            running[index] = started(where / "phalanx", checks, where / "answer.json")
        for index, process in list(running.items()):
            found = ended(process, tasks[index][1])
            if found is not None:
                del running[index]
                answers[index] = found
                mutation = tasks[index][0]
                name = mutation.fault if mutation else tasks[index][1][0]
                print(
                    f"{time.monotonic() - process.began:5.0f} s  {name}: {found.check or 'nothing'}; {found.words}",
                    flush=True,
                )
        time.sleep(0.05)
    return [found for found in answers if found is not None]


def page(chosen: Sequence[Mutation], found: Sequence[Found]) -> str:
    """The table of faults."""
    killed = sum(bool(one.check) for one in found)
    rows = [
        f"| {mutation.fault} | `{mutation.file}` | {_check(one)} | {_cell(one.words)} |"
        for mutation, one in zip(chosen, found, strict=True)
    ]
    return "\n".join(
        [
            "# Faults that are found",
            "",
            "Each row is a fault that is put into a copy of the code, one at a time, and the check that then fails.",
            "*prove* is a proof against [the plain loop](../explanation/proof.md#the-plain-loop), of a small job under",
            "a plan; *copies* is its part about copies on ranks; *fit*, *resume*, *again* (a whole run, taken up from",
            "its middle) and *ledger* are runs held against that loop and the ledger; *test* is a file of tests.",
            "Every check passes on the code as it is. Written by `make mutants`.",
            "",
            f"{killed} of {len(chosen)} are found.",
            "",
            "| fault | in | found by | which says |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def _check(found: Found) -> str:
    return f"`{found.check}`" if found.check else "**nothing**"


def _cell(words: str) -> str:
    words = re.sub(r"\S*/phalanx-\w+-[^/\s]*/", "", words)  # a folder of that run only
    short = words if len(words) <= 160 else f"{words[:157]}..."
    return short.replace("|", "\\|").replace("\n", " ").replace("<", "\\<").replace("*", "\\*").replace("_", "\\_")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    if asked.page and asked.only:
        parser.error("--page is of all faults: leave --only out")
    chosen = [one for one in ALL if asked.only in f"{one.fault} {one.file} {one.checks}"]
    gone = [one for one in chosen if not one.applies]
    for one in gone:
        print(f"no longer applies: {one.fault} ({one.file})", file=sys.stderr)
    chosen = [one for one in chosen if one.applies]
    import numpy as np  # noqa: F401  loaded once, for every process to come
    import torch

    torch.set_num_threads(1)
    checks = list(dict.fromkeys(words for one in chosen for words in one.checks))
    with tempfile.TemporaryDirectory(prefix="phalanx-mutants-") as name:
        folder = Path(name)
        sound = run([(None, (words,)) for words in checks], folder, asked.jobs)
        if broken := [one for one in sound if one.check]:
            print(f"fails without a fault: {broken}", file=sys.stderr)
            return 1
        found = [judged(one) for one in run([(one, one.checks) for one in chosen], folder, asked.jobs)]
    if asked.page and not gone:
        asked.page.write_text(page(chosen, found))
    alive = [f"{one.fault} {how.words}" for one, how in zip(chosen, found, strict=True) if not how.check]
    print(f"{len(chosen) - len(alive)} of {len(chosen)} found; not found: {alive}")
    return 1 if alive or gone else 0


if __name__ == "__main__":
    sys.exit(main())
