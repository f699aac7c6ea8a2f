"""A machine that a run would be on, as far as it can be asked something before: ``TargetHost``, and this machine."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import final

from phalanx.errors import Problem
from phalanx.launch.check_hosts.started_program import run_here

CODE_OF_CHECK = 32 << 20
"""Bytes of all files of a job's code that are sent to a host for a check; there must be time for what it asks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeForHost:
    """A job's code as a target sends it to a host that has it not.

    Attributes:
        root: the folder that it is of.
        nbytes: of all its files.
        digests: path of each, below ``root`` → its SHA-256.
        pack: as a ``tar.gz``; empty where that is too much for a check.
        refused: why launching would refuse to send it; ``None`` where it would not.
    """

    root: Path = Path()
    nbytes: int = 0
    digests: Mapping[str, str] = field(default_factory=dict[str, str])
    pack: bytes = b""
    refused: Problem | None = None


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

    def sent_code(self, reference: str, run_folder: Path) -> CodeForHost | None:
        """What the target sends of the job's code to a host that has it not; ``None`` where it sends none."""
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


def program_text(*modules: ModuleType) -> str:
    """One program of the texts of ``modules``, each after those that it imports.

    It is sent to where no import finds them, or finds those of another version: their imports of Phalanx at the start
    of a line, each in one line, are left out.
    """
    parts: list[str] = []
    for module in modules:
        lines = Path(str(module.__file__)).read_text(encoding="utf-8").splitlines(keepends=True)
        text = "".join("\n" if line.startswith("from phalanx.") else line for line in lines)
        parts.append(f"exec(compile({text!r}, {module.__name__!r}, 'exec'))\n")
    return "".join(parts)
