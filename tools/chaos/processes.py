"""A run's processes seen from outside, by ``/proc``: which rank each is, what is left of them, what they were sent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import Problem, RefusedError
from phalanx.launch.worker_process import RANK_NAME

_PR_SET_CHILD_SUBREAPER = 36
_SOON = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessEntry:
    """One process: its number, its parent's, its name, and whether it has ended but not been waited for."""

    pid: int
    parent: int
    name: str
    ended: bool


def refuse_without_proc() -> None:
    """Refuse systems that do not show processes as Linux does.

    Raises:
        RefusedError: it is such a system.
    """
    if sys.platform != "linux" or not Path("/proc/self/stat").exists():
        allowed = "Linux with /proc, by which ranks are found and hit from outside"
        raise RefusedError([Problem(where="chaos", given=sys.platform, allowed=allowed, fix="a Linux machine")])


@contextmanager
def adopting() -> Iterator[None]:
    """For the length of the block, what descendants of this process leave behind becomes this process's child.

    So nothing that a run started is lost sight of, however it was started and whoever of its parents was killed.
    """
    _set_subreaper(1)
    try:
        yield
    finally:
        _set_subreaper(0)


def _set_subreaper(value: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, value, 0, 0, 0)


def all_processes() -> dict[int, ProcessEntry]:
    """Every process of this machine, by its number."""
    found: dict[int, ProcessEntry] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            text = Path(f"/proc/{name}/stat").read_text(errors="replace")
        except OSError:  # it has ended meanwhile
            continue
        begin, end = text.index("("), text.rindex(")")
        state, parent = text[end + 2 :].split()[:2]
        ended = state in "ZX"
        found[int(name)] = ProcessEntry(pid=int(name), parent=int(parent), name=text[begin + 1 : end], ended=ended)
    return found


def descendants(root: int) -> list[ProcessEntry]:
    """Whatever the process ``root`` started and what these started, without those that have ended; parents first."""
    everyone = all_processes()
    children: dict[int, list[ProcessEntry]] = {}
    for entry in everyone.values():
        children.setdefault(entry.parent, []).append(entry)
    found, waiting = list[ProcessEntry](), [root]
    while waiting:
        waiting = [entry.pid for pid in waiting for entry in children.get(pid, ())]
        found += [everyone[pid] for pid in waiting]
    return [entry for entry in found if not entry.ended]


def rank_processes(launcher: int) -> dict[int, int]:
    """Rank → process, of the workers below ``launcher``. What a worker forks has its name, and is left out."""
    named = {entry.pid: entry for entry in descendants(launcher) if entry.name.startswith(RANK_NAME)}
    workers = [entry for entry in named.values() if entry.parent not in named]
    return {int(entry.name.removeprefix(RANK_NAME)): entry.pid for entry in workers}


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to each that is still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def left_over(before: set[int], *, patience: float) -> list[ProcessEntry]:
    """Descendants of this process that are not among those ``before`` and do not end in so many seconds.

    Those that have ended and that this process has become the parent of are waited for.
    """
    deadline = time.monotonic() + patience
    while True:
        _wait_for_orphans(before)
        found = [entry for entry in descendants(os.getpid()) if entry.pid not in before]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(_SOON)


def _wait_for_orphans(before: set[int]) -> None:
    own = os.getpid()
    for entry in all_processes().values():
        if entry.parent == own and entry.ended and entry.pid not in before:
            with suppress(ChildProcessError):
                os.waitpid(entry.pid, os.WNOHANG)


def children_of_this_process() -> set[int]:
    """Numbers of this process's descendants, ended ones included."""
    own = os.getpid()
    return {entry.pid for entry in descendants(own)} | {
        entry.pid for entry in all_processes().values() if entry.parent == own
    }


def end_all(processes: Iterable[ProcessEntry]) -> None:
    """Kill them."""
    send([entry.pid for entry in processes], signal.SIGKILL)
