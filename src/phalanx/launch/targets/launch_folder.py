"""The files of a launch in the run folder.

``config/run_files.py`` describes each file.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from phalanx.config import RunSpec
from phalanx.errors import SpecError
from phalanx.events import RunLog
from phalanx.files import make_folder, open_plain, read_text

FOLDER = "launch"
"""Folder of a launch's files in the run folder."""

TICKET = "ticket.json"
CODE_LIST = "code.txt"
OUTPUT = "output.log"

State = Literal["waiting", "running", "ended", "stopped", "failed", "unknown"]
"""State of a launched run; ``unknown``: the target has forgotten it or does not answer."""


def attached_log(folder: Path, rank: int | None) -> Path:
    """Return the file with the output of ``rank``, or of all ranks, below the run folder."""
    return folder / FOLDER / (OUTPUT if rank is None else f"rank-{rank}.log")


def append(path: Path, data: bytes, below: int = 2) -> None:
    """Append to a file below a run folder; ``below``: number of last parts of its path that may be no links.

    Raises:
        SpecError: one of them is.
    """
    make_folder(path.parent, below=below - 1)
    with os.fdopen(open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, below=below), "ab") as file:
        file.write(data)


def fetched_log(folder: Path, name: str, lines: Iterable[str], rank: int | None) -> Path:
    """Append the new ``lines`` of a run to a file named after its job, or those of ``rank`` to a file of their own.

    A reader that follows the file sees each line once. ``node_agent.py`` marks the lines of a rank.
    """
    path, mark = folder / FOLDER / f"{name}.log", f"[rank {rank}] "
    if rank is not None:
        path = path.with_name(f"{name}.rank-{rank}.log")
        lines = [line.removeprefix(mark) for line in lines if line.startswith(mark)]
    known, new = Counter[str](), list[str]()
    with suppress(FileNotFoundError), os.fdopen(open_plain(path, os.O_RDONLY, below=2), newline="") as file:
        known.update(line.removesuffix("\n") for line in file)
    for line in lines:
        known[line] -= 1
        new += [f"{line}\n"] if known[line] < 0 else []
    if new:
        append(path, "".join(new).encode())
    return path


def run_from(runfile: Path, fix: str) -> RunSpec:
    """Read the run file of a launch; ``fix``: advice if it cannot be read.

    Raises:
        SpecError: it is missing or damaged.
    """
    return RunSpec.from_toml(read_text(runfile, where="run file", fix=fix, below=0))


def slowest_save(folder: Path) -> float:
    """Return the seconds of the run's slowest checkpoint; 0 if it has saved none."""
    with suppress(SpecError):
        return max((one["seconds"] for one in RunLog(folder).named("checkpoint")), default=0.0)
    return 0.0
