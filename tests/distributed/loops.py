"""What several files share: scripts under torchrun, launchers without workers, workers that wait for each other."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest


def torchrun(folder: Path, *words: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Run ``script.py`` of the folder under torchrun, or by itself for one rank."""
    return subprocess.run(
        torchrun_command(*words, ranks=ranks), capture_output=True, text=True, timeout=100, cwd=folder, check=False
    )


def torchrun_command(*words: str, ranks: int = 2) -> list[str]:
    """Words of the command that starts ``script.py``."""
    agent = ["-m", "torch.distributed.run", "--nproc-per-node", f"{ranks}", "--standalone"] if ranks > 1 else []
    return [sys.executable, "-W", "ignore", *agent, "script.py", *words]


def forbid_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if a launcher of this host starts a worker."""
    from phalanx.launch.worker_pool import WorkerPool

    def started(*_: Any) -> Any:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(WorkerPool, "start", started)


LIMIT = 60.0  # seconds to wait for the others


class Together:
    """Processes that this one starts and that meet: each has come as often as the others before it goes on."""

    def __init__(self, folder: Path, many: int) -> None:
        folder.mkdir()
        self._folder, self._many, self._maker = folder, many, os.getpid()

    def meet(self) -> None:
        """Wait for the others; raises ``TimeoutError`` where they do not come."""
        own, until = self._folder / str(os.getpid()), time.monotonic() + LIMIT
        with own.open("ab") as file:
            file.write(b".")
        times = own.stat().st_size
        while sum(each.stat().st_size >= times for each in self._folder.iterdir()) < self._many:
            if time.monotonic() > until:
                raise TimeoutError(
                    f"{self._many} were to come {times} times: {len(list(self._folder.iterdir()))} have begun"
                )
            time.sleep(0.002)

    def meet_first(self) -> None:
        """As ``meet``, the first time only; this process, and whom its children start to look at a job, go on."""
        if os.getppid() == self._maker and not (self._folder / str(os.getpid())).exists():
            self.meet()
