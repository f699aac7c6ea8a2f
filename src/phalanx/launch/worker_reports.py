"""What workers that are programs of their own leave for their launcher, in a folder that both see.

A forked worker has pipes to its launcher. One that was started as ``phalanx worker RUNFILE --reports FOLDER`` writes
there which process it is and how far it came, and how it failed if it did; the launcher reads it.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import final

from phalanx.launch.failure import Failure

_PROGRESS = struct.Struct("=qq")  # process id; optimizer step, -1 before the first
_NO_STEP = -1


@final
class WorkerReports:
    """The folder, written by workers and read by their launcher; it belongs to the launcher, who removes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._progress: dict[int, int] = {}

    def write_step(self, rank: int, step: int | None) -> None:
        """In the worker ``rank``: the optimizer step that begins, ``None`` as long as none has. About a microsecond."""
        if rank not in self._progress:
            self._progress[rank] = os.open(self._progress_file(rank), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.pwrite(self._progress[rank], _PROGRESS.pack(os.getpid(), _NO_STEP if step is None else step), 0)

    def write_failure(self, failure: Failure) -> None:
        """In a worker: how it failed. Whole or not at all: the launcher looks at any time."""
        file = self.folder / f"failure-{failure.rank}.json"
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(failure)), encoding="utf-8")
        partial.replace(file)

    def failures(self) -> list[Failure]:
        """In the launcher: what workers have reported so far."""
        return [Failure(**json.loads(file.read_text(encoding="utf-8"))) for file in self.folder.glob("failure-*.json")]

    def step(self, rank: int) -> int | None:
        """In the launcher: the optimizer step the worker ``rank`` is in, ``None`` before the first."""
        step = next((step for _, step in _read(self._progress_file(rank))), _NO_STEP)
        return None if step == _NO_STEP else step

    def processes(self) -> list[int]:
        """In the launcher: the process ids of the workers that have begun."""
        return [pid for file in self.folder.glob("progress-*") for pid, _ in _read(file)]

    def _progress_file(self, rank: int) -> Path:
        return self.folder / f"progress-{rank}"


def _read(progress: Path) -> Iterator[tuple[int, int]]:
    """Process id and step; nothing where the worker has only just made the file, or not yet."""
    data = progress.read_bytes() if progress.exists() else b""
    if len(data) == _PROGRESS.size:
        yield _PROGRESS.unpack(data)
