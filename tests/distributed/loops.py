"""Things that several files of this folder share: scripts under torchrun, and launchers that start no worker."""

from __future__ import annotations

import subprocess
import sys
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
    from phalanx.launch.local import LocalLauncher

    def started(*_: Any) -> Any:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(LocalLauncher, "start", started)
