"""Signals that ask a run to stop and save, and small functions about processes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Self, final

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SOON = 0.02  # seconds between looks at children that are about to end

SAVED = 75
"""Exit code of a run that was asked to stop and has saved: ``EX_TEMPFAIL``, which schedulers take for "try again"."""

_ONCE = (signal.SIGUSR1, signal.SIGHUP)
"""Signals that end nothing at once by coming twice; a closed terminal and its shell each send SIGHUP."""

_SAME = 0.2  # seconds within which a second signal is the first once more, passed on by a program around this one


@final
class StopRequest:
    """The first signal that asks this process to stop, kept for the length of the block.

    A later Ctrl-C or SIGTERM calls ``again`` with its number. Without ``again`` it acts as it would outside the block.

    Attributes:
        number: of the signal; 0 before one came.
        held: later signals do nothing.
    """

    def __init__(
        self, again: Callable[[int], None] | None = None, *, ctrl_c: bool = True, seconds: float = 0.0
    ) -> None:
        """``ctrl_c=False`` leaves Ctrl-C to the launcher of this process.

        ``seconds``: from the first signal to the end of this process, if the block lasts longer; 0: no limit.
        """
        self.number, self.held = 0, False
        self._again, self._ctrl_c = again or self.act_as_before, ctrl_c
        self._pid, self._when, self._seconds, self._over = os.getpid(), 0.0, seconds, False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, *_ONCE):
                found = signal.getsignal(number)
                outer = getattr(found, "__self__", None)
                if isinstance(outer, StopRequest):
                    self.number, self._when = outer.number, outer._when
                ours = number in (signal.SIGINT, signal.SIGTERM) or isinstance(outer, StopRequest)
                # not a signal that is ignored, nor one that the program around this one uses itself
                if found is not signal.SIG_IGN and (ours or found is signal.SIG_DFL):
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def act_as_before(self, number: int) -> None:
        """Send this process the signal, to the handler that it had before the block."""
        signal.signal(number, self._before[number] or signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if os.getpid() != self._pid:  # a process that the job has forked has this handler, too
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif number == signal.SIGINT and not self._ctrl_c:
            return
        elif not self.number:
            self.number, self._when = number, now
            if self._seconds:
                threading.Thread(target=self._end_late, daemon=True).start()
        elif number not in _ONCE and now - self._when > _SAME and not self.held:
            self._again(number)

    def _end_late(self) -> None:
        time.sleep(self._seconds)
        if not self._over:
            os._exit(128 + self.number)


def ignore_signal(number: int) -> None:
    """Do nothing about a second signal: the launcher ends this process."""


def raise_stopped(number: int, *, saved: bool) -> None:
    """End this process as one that was asked to by that signal; do nothing for 0.

    Raises:
        KeyboardInterrupt: after Ctrl-C.
        SystemExit: after another, with ``SAVED`` or the code a shell expects.
    """
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    if number:
        raise SystemExit(SAVED if saved else 128 + number)


@contextmanager
def terminated_later() -> Generator[None]:
    """Ignore SIGTERM within the block, in the main thread, so that a report is written whole."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def fork() -> int:
    """Call ``os.fork`` without Python 3.12's warning about other threads.

    The warning is about locks that those threads may hold; forked processes share none with them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def die_with(launcher: int) -> None:
    """Have the kernel end this process when its launcher ends."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it ended before the request
        os._exit(1)


def kill_group(pid: int, number: int) -> None:
    """Send a signal to a worker and to every process it started; do nothing if they are gone."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        # not yet a group leader, or only zombies are left
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def adopt_orphans() -> None:
    """Become the parent of processes that this one's children leave behind, as a container's first process is."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def await_orphans(seconds: float) -> None:
    """Wait until every child of this process has ended, for at most so long; nothing else may wait for one."""
    until = time.monotonic() + seconds
    with suppress(ChildProcessError):
        while time.monotonic() < until:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(_SOON)


def prctl(option: int, value: object) -> None:
    """Set a property of this process, where it is Linux's."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


@final
class Reaper:
    """A tiny process that ends the workers' own children, such as data loading processes, after a ``kill -9`` here.

    The kernel ends the workers with their launcher, but not their children.
    """

    def __init__(self, groups: Sequence[int]) -> None:
        """``groups``: the process ids of workers, which lead a group each."""
        reading, self._writing = os.pipe()
        self._pid = fork()
        if self._pid == 0:
            try:
                os.setsid()  # Ctrl-C in the terminal is not meant for this one
                os.closerange(0, reading)
                os.closerange(reading + 1, os.sysconf("SC_OPEN_MAX"))
                os.read(reading, 1)  # until the launcher ends: it holds the other end
                for pid in groups:
                    with suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
            finally:
                os._exit(0)
        os.close(reading)

    def dismiss(self) -> None:
        """End this process once all workers have ended."""
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._writing)
