"""A machine that a run would be on, as far as it can be asked something before: ``TargetHost``, and this machine."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import final

from phalanx.launch.check_hosts.started_program import run_here


class TargetHost(ABC):
    """One machine of a launch target. It runs a program when asked; how it is reached is the target's business.

    Attributes:
        name: as the user knows it; no two hosts of a target have one name.
        address: that the other hosts reach it by; empty where it is to say so itself.
        processes: workers it is to have; 0 where that follows from its devices.
        folder: that workers work in there; empty where it is that of whoever asks.
        scratch: where the target puts what the host does not share with whoever asks, the job's code and a copy of the
            run folder; empty where the target needs shared folders.
    """

    name: str
    address: str = ""
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

        Stdin stays open until it has ended: it closes where whoever asks is gone, upon which the program ends. It runs
        with the environment that workers have. Called from several threads at once, it does not wait for other calls.

        Raises:
            RunError: it cannot be reached, has no such Python, or has not ended within ``patience`` seconds; in a
                sentence about the host without its name. What it runs is ended.
        """


@final
class ThisMachine(TargetHost):
    """The machine that asks."""

    def __init__(self, python: str = sys.executable) -> None:
        """``python``: the interpreter that workers are started by."""
        self.name = "this machine"
        self._python = python

    def run(self, arguments: Sequence[str], text: str, patience: float) -> str:
        return run_here([self._python, *arguments], text, patience)
