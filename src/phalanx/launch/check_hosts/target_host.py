"""A machine that a run would be on, as far as it can be asked something before: ``TargetHost``, and this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import final

from phalanx.errors import RunError


class TargetHost(ABC):
    """One machine of a launch target. It runs a program when asked; how it is reached is the target's business.

    Attributes:
        name: as the user knows it; no two hosts of a target have one name.
        address: that the other hosts reach it by; empty where it is to say so itself.
        port: where all workers meet, on the host that they meet at; 0 where any free port will do.
        processes: workers it is to have; 0 where that follows from its devices.
        folder: that workers work in there; empty where it is that of whoever asks.
        scratch: where the target puts what the host does not share with whoever asks, the job's code and a copy of the
            run folder; empty where the target needs shared folders.
    """

    name: str
    address: str = ""
    port: int = 0
    processes: int = 0
    folder: str = ""
    scratch: str = ""

    def sent_code(self, reference: str, run_folder: Path) -> tuple[bytes, Path] | None:
        """The pack of the job's code as the target sends it to a host that has it not, and the folder that it is of.

        ``None`` where it sends none, or it is too much for a check.
        """
        return None

    @abstractmethod
    def run(self, arguments: Sequence[str], text: str, patience: float) -> str:
        """What the Python that workers are started by prints, given ``arguments`` and ``text`` on stdin.

        It runs with the environment that workers have. Called from several threads at once, it does not wait for other
        calls.

        Raises:
            RunError: it cannot be reached, has no such Python, or has not ended within ``patience`` seconds; in a
                sentence about the host without its name. What it runs is ended.
        """


@final
class ThisMachine(TargetHost):
    """The machine that asks."""

    def __init__(self) -> None:
        self.name = "this machine"

    def run(self, arguments: Sequence[str], text: str, patience: float) -> str:
        return run_here([sys.executable, *arguments], text, patience)


def run_here(command: Sequence[str], text: str, patience: float) -> str:
    """What ``command`` prints, given ``text`` on stdin.

    Raises:
        RunError: there is no such program, it fails, or it has not ended within ``patience`` seconds; what it started
            is ended, too.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        started = subprocess.Popen([*command], text=True, errors="replace", start_new_session=True, **pipes)  # pyright: ignore
    except OSError as error:
        raise RunError(f"{command[0]} cannot be started: {error.strerror}") from None
    with started:
        try:
            out, err = started.communicate(text, timeout=patience)
        except subprocess.TimeoutExpired:
            raise RunError(f"gives no answer within {patience:g} s") from None
        finally:
            if started.poll() is None:
                os.killpg(started.pid, 9)
    if started.returncode:
        lines = [line for line in err.splitlines() if line.strip()]
        raise RunError(lines[-1].strip() if lines else f"{command[0]} ended with exit code {started.returncode}")
    return out
