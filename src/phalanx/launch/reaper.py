"""What keeps a launch from leaving anything behind: signals to the launcher, and the launcher's own violent death."""

from __future__ import annotations

import os
import signal
import struct
import threading
import warnings
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn, Self, final

_PID = struct.Struct("=q")


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


def is_running(pid: int) -> bool:
    """Whether there is a process of that number, ended ones that nobody has asked about included."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@final
class Interrupts:
    """Ctrl-C and SIGTERM, remembered for the length of the block rather than raised in the middle of something.

    ``check`` raises them where that is safe. A second signal raises at once (the launcher may be stuck in a callback),
    except while ``held`` is set: nothing may cut a start or the clean-up short.
    """

    def __init__(self) -> None:
        self.held = False
        self._caught = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and the like stay in force
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if error is None or isinstance(error, Exception):
            self.check()

    def check(self) -> None:
        """Raise what was caught.

        Raises:
            KeyboardInterrupt: after Ctrl-C.
            SystemExit: after SIGTERM, with the code a shell expects.
        """
        if self._caught == signal.SIGINT:
            raise KeyboardInterrupt
        if self._caught:
            raise SystemExit(128 + self._caught)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = self._caught != 0
        self._caught = self._caught or number
        if again and not self.held:
            self.check()


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
        os.write(self._writing, _PID.pack(pid))

    def remove(self, pid: int) -> None:
        """This worker is gone; its number may soon belong to someone else."""
        os.write(self._writing, _PID.pack(-pid))

    def forget(self) -> None:
        """In a forked worker: let go of the pipe, which must close with the launcher."""
        os.close(self._writing)

    def dismiss(self) -> None:
        """All workers are gone in the proper way."""
        os.kill(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
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
