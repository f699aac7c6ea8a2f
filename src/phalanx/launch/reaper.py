"""What keeps a launch from leaving anything behind: signals to the launcher, and the launcher's own violent death."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn, Self, final

_PID = struct.Struct("=q")
_PR_SET_CHILD_SUBREAPER = 36
_SOON = 0.02  # seconds between looks at children that are about to end


def fork() -> int:
    """``os.fork`` without Python 3.12's warning of forking beside other threads.

    The warning is about locks that those threads may hold; workers are forked from a thread that shares none with them,
    and use none of the launcher's streams.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def kill_group(pid: int, number: int) -> None:
    """Send a signal to a worker and to every process it started; nothing happens where they are gone."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        # not yet a group leader, or only zombies are left
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def adopt_orphans() -> None:
    """Become the parent of what processes that this one has started leave behind, as a container's first process is."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def await_orphans(seconds: float) -> None:
    """Wait until every child of this process has ended, for at most so long; nobody else may wait for one."""
    until = time.monotonic() + seconds
    with suppress(ChildProcessError):
        while time.monotonic() < until:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(_SOON)


SAVED = 75
"""Exit code of a run that was asked to stop and has saved: ``EX_TEMPFAIL``, which schedulers take for "try again"."""

RESIZE = signal.SIGURG
"""By which a launcher asks workers to save and stop, to start them again in another number. Nobody else's to send."""

_ONCE = (signal.SIGUSR1, signal.SIGHUP)
"""Signals that end nothing at once by coming twice; a closed terminal and its shell each send SIGHUP."""

_SAME = 0.2  # seconds within which a second signal is the first once more, passed on by a program around this one


@final
class Interrupts:
    """Signals that ask to stop, remembered for the length of the block, not raised in the middle of something.

    ``check`` raises them where that is safe. A second Ctrl-C or SIGTERM raises at once (the launcher may be stuck in a
    callback), except while ``held`` is set: nothing may cut a start or the clean-up short.

    Attributes:
        caught: the number of the first signal, 0 as long as there is none.
        saved: what was asked to stop has done so, with a checkpoint.
    """

    def __init__(self) -> None:
        self.held = self.saved = False
        self.caught = 0
        self._when = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = _catch(self._handle)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        _restore(self._before)
        if error is None or isinstance(error, Exception):
            self.check()

    def check(self) -> None:
        """Raise what was caught.

        Raises:
            KeyboardInterrupt: after Ctrl-C.
            SystemExit: after another, with ``SAVED`` or the code a shell expects.
        """
        raise_stopped(self.caught, saved=self.saved)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        again = self.caught != 0 and number in (self.caught, signal.SIGINT) and number not in _ONCE
        again = again and now - self._when > _SAME
        self.caught, self._when = self.caught or number, self._when or now
        if again and not self.held:
            self.check()


def raise_stopped(number: int, *, saved: bool) -> None:
    """End this process as who was asked to by that signal; nothing for 0.

    Raises:
        KeyboardInterrupt: after Ctrl-C.
        SystemExit: after another, with ``SAVED`` or the code a shell expects.
    """
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    if number:
        raise SystemExit(SAVED if saved else 128 + number)


@final
class StopSignals:
    """In a worker: signals that ask the run to stop, remembered for the length of the block.

    A worker that a launcher started leaves Ctrl-C and what comes twice to it. One that was started by itself ends at
    once by the second, or when the time for the last checkpoint is over.
    """

    def __init__(self, launcher_asks: Callable[[], int] | None = None, *, alone: float | None = None) -> None:
        """``launcher_asks()`` gives a signal's number, 0 for nothing, ``ENDING`` if the launcher ends workers.

        ``alone``: seconds for the last checkpoint, where nobody else looks at the time.
        """
        self._launcher_asks, self._alone = launcher_asks, alone
        self._pid, self._number, self._when, self._over = os.getpid(), 0, 0.0, False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = _catch(self._handle, *([] if self._alone is not None else [RESIZE]))
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        _restore(self._before)

    def asked(self) -> int:
        """The number of the signal that asks this worker to stop, 0 where none does."""
        return self._number or (max(0, self._launcher_asks()) if self._launcher_asks else 0)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now, alone = time.monotonic(), self._alone is not None
        again = alone and self._number != 0 and number not in _ONCE and now - self._when > _SAME
        ending = self._launcher_asks is not None and self._launcher_asks() == ENDING
        if os.getpid() != self._pid or ending or again:
            signal.signal(number, signal.SIG_DFL)  # a process that the job has forked has this handler, too
            os.kill(os.getpid(), number)
        elif not self._number and not (self._launcher_asks and number == signal.SIGINT):
            self._number, self._when = number, now
            if self._alone is not None:
                threading.Thread(target=self._end_after, args=(self._alone,), daemon=True).start()

    def _end_after(self, seconds: float) -> None:
        time.sleep(seconds)
        if not self._over:
            os._exit(128 + self._number)


def leave_signals() -> None:
    """From now on this process does nothing about signals that ask a run to stop: it is about to end."""
    for number in _catch(lambda number, frame: None):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def terminated_later() -> Generator[None]:
    """Within, SIGTERM does nothing, so that what has been begun is whole; whoever sent it has to say so once more.

    On another thread than the main one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


@final
class LoopSignals:
    """In a loop of one's own: the first signal that asks to stop is remembered, for the length of the block.

    A second one does what it would have done without, and so does one that nobody has taken up by the block's end.

    Attributes:
        number: of the signal, 0 as long as there is none.
        taken_up: whoever leaves the block has done what it asks for.
    """

    def __init__(self) -> None:
        self.number, self.taken_up = 0, False
        self._pid, self._when = os.getpid(), 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = _catch(self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        _restore(self._before)
        if self.number and not self.taken_up:
            os.kill(os.getpid(), self.number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if os.getpid() != self._pid or (self.number and number != signal.SIGHUP and now - self._when > _SAME):
            self.taken_up = True
            _restore({number: self._before[number]})
            os.kill(os.getpid(), number)
        elif not self.number:
            self.number, self._when = number, now


ENDING = -1
"""In place of a signal's number: workers are not to stop, but to be gone."""


def _catch(handler: Callable[[int, FrameType | None], None], *more: signal.Signals) -> dict[int, Any]:
    """Have signals that ask to stop handled, those aside that nobody heeds or the program around us uses itself.

    Returns the handlers before; only the main thread can do it.
    """
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, *_ONCE, *more):
            found = signal.getsignal(number)
            usual = number in (signal.SIGINT, signal.SIGTERM)
            if found is not signal.SIG_IGN and (usual or found is signal.SIG_DFL):
                before[number] = signal.signal(number, handler)
    return before


def _restore(before: dict[int, Any]) -> None:
    for number, handler in before.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


@final
class Reaper:
    """A tiny process that outlives a killed launcher just long enough to end what the workers had started.

    The kernel ends the workers with the launcher (PR_SET_PDEATHSIG), but not their children, such as data loading
    processes. The reaper knows the workers' process groups and waits on a pipe that only the launcher holds open.
    """

    def __init__(self) -> None:
        reading, self._writing = os.pipe()
        self.pid = fork()
        if self.pid == 0:
            _watch_over_groups(reading)
        os.close(reading)

    def add(self, pid: int) -> None:
        """From now on this worker's group is to be ended with the launcher."""
        with suppress(BrokenPipeError):  # it was killed, and ends nothing any more: no reason to end the run
            os.write(self._writing, _PID.pack(pid))

    def remove(self, pid: int) -> None:
        """This worker is gone; its number may soon belong to someone else."""
        self.add(-pid)

    def forget(self) -> None:
        """In a forked worker: let go of the pipe, which must close with the launcher."""
        os.close(self._writing)

    def dismiss(self) -> None:
        """All workers are gone in the proper way."""
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._writing)


def _watch_over_groups(reading: int) -> NoReturn:
    try:
        os.setsid()  # Ctrl-C in the terminal is not meant for this one
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        # holding on to anything else would keep other people's pipes open
        os.closerange(0, reading)
        os.closerange(reading + 1, os.sysconf("SC_OPEN_MAX"))
        groups: set[int] = set()
        while len(message := os.read(reading, _PID.size)) == _PID.size:
            (pid,) = _PID.unpack(message)
            groups.add(pid) if pid > 0 else groups.discard(-pid)
        for pid in groups:
            kill_group(pid, signal.SIGKILL)
    finally:
        os._exit(0)
