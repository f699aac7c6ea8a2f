"""Faults to inject into workers: each goes wrong in one way, at one rank and one step."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

LIMIT = 20.0  # seconds in which everything is over after a fault; one that goes unseen leaves sleepers for longer


def raise_error() -> None:
    raise ValueError("the injected fault")


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crash() -> None:
    ctypes.string_at(0)


def leave_silently() -> None:
    os._exit(0)


def exhaust_memory() -> None:
    """Ask for more than the process is allowed to have, as a model that does not fit does."""
    limit = psutil.Process().memory_info().vms + (256 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.empty(1 << 30, dtype=torch.uint8)


def hang() -> None:
    time.sleep(600)


def hang_on() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hang()


@dataclass(frozen=True, kw_only=True)
class Fault:
    rank: int
    step: int
    how: Callable[[], None]

    def strike(self, rank: int, step: int) -> None:
        if (rank, step) == (self.rank, self.step):
            self.how()


def start_child(folder: Path) -> None:
    """Start a process of the worker's own, as data loading does, and note its number."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    note(folder, child.pid)


def note(folder: Path, pid: int) -> None:
    (folder / f"pid-{pid}").touch()


def noted(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]


def alive(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


class Looks:
    """Calls that the processes which this one forks see as well: by them they go no further than it has seen."""

    def __init__(self) -> None:
        self._count = memoryview(mmap.mmap(-1, 8)).cast("q")

    def __call__(self) -> None:
        self._count[0] += 1

    def wait(self, looks: int = 1) -> None:
        """In another process: wait for so many, for as long as everything may take; not before the first of all."""
        before, until = self._count[0], time.monotonic() + LIMIT
        while before and self._count[0] < before + looks and time.monotonic() < until:
            time.sleep(0.002)


def wait_until(condition: Callable[[], bool], timeout: float) -> bool:
    """Whether it comes true within ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
