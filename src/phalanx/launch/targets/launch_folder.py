"""What a launch leaves in the run folder, by name, and what that folder tells whoever starts the run or follows it.

``config/run_files.py`` says of each file what is in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from phalanx.config import RunSpec
from phalanx.config.run_files import EVENTS
from phalanx.errors import SpecError
from phalanx.events.log import read
from phalanx.files import make_folder, open_plain, read_text

FOLDER = "launch"
"""What a launch writes in the run folder stands in a folder of this name."""

TICKET = "ticket.json"
CODE_LIST = "code.txt"
OUTPUT = "output.log"

State = Literal["waiting", "running", "ended", "stopped", "failed", "unknown"]
"""How a run that was handed over stands: ``unknown`` where the target has forgotten it or cannot be asked."""

LAST_WORDS: Mapping[str, State] = {"end": "ended", "stopped": "stopped", "error": "failed"}
"""How a run stands whose target has forgotten it, by the last of its events that says so."""

_WORDS = ("start", "resume", *LAST_WORDS)


def log_name(rank: int | None) -> str:
    """The file with what ``rank`` has printed, or what all have."""
    return OUTPUT if rank is None else f"rank-{rank}.log"


def attached_log(folder: Path, rank: int | None) -> Path:
    """The file in the run folder with what ``rank`` has printed, or all, under a launcher that has followed the run."""
    return folder / FOLDER / log_name(rank)


def append(path: Path, data: bytes, below: int = 2) -> None:
    """Append to a file below a run folder; ``below``: how many of the last parts of its path may be no links.

    Raises:
        SpecError: one of them is.
    """
    make_folder(path.parent, below=below - 1)
    with os.fdopen(open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, below=below), "ab") as file:
        file.write(data)


def run_from(runfile: Path, fix: str) -> RunSpec:
    """The run that was handed over by this run file; ``fix``: what to do where it cannot be read.

    Raises:
        SpecError: it is not there, or is damaged.
    """
    return RunSpec.from_toml(read_text(runfile, where="run file", fix=fix, below=0))


def last_word(folder: Path) -> str:
    """The last of a run's events that says how it stands: ``start``, ``resume``, ``stopped``, ``error`` or ``end``."""
    with suppress(SpecError):
        return word_of(read(folder / EVENTS))
    return ""


def word_of(events: Iterable[Mapping[str, Any]]) -> str:
    """The same of these events of a run; empty where none says it."""
    words = [event["event"] for event in events if event["event"] in _WORDS]
    return words[-1] if words else ""


def slowest_save(folder: Path) -> float:
    """Seconds that the slowest checkpoint of the run took; 0 where it has saved none."""
    slowest = 0.0
    with suppress(SpecError):
        for event in read(folder / EVENTS):
            if event["event"] == "checkpoint":
                slowest = max(slowest, event["seconds"])
    return slowest
