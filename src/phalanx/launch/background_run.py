"""A run in the background: one process beside this one that starts its workers, follows them, and ends with this one.

This process keeps no thread for it. The other one is forked, so that jobs need not be found by name; it says once that
the run has begun, and leaves in a file how it ended.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn, final

from phalanx.errors import RunError, WorkerError, error_from_dict, error_to_dict
from phalanx.launch.reaper import fork
from phalanx.launch.worker_process import printer

Work = Callable[[Callable[[], None]], None]
"""Trains; calls what it is given once the run has begun."""

_SOON = 0.02  # seconds between looks whether it has ended
_LOOK = 0.2  # seconds between its looks whether this process is still there
_OF_WORKER = ("rank", "step", "kind", "traceback", "exit_code")

_live: set[BackgroundRun] = set()


@final
class BackgroundRun:
    """The process of one run, which this process has started."""

    def __init__(self, folder: Path, pid: int, report: IO[bytes]) -> None:
        self._folder, self._pid, self._report = folder, pid, report
        self._owner, self._ended = os.getpid(), False
        self._error: Exception | None = None

    @classmethod
    def begin(cls, folder: Path, work: Work) -> BackgroundRun:
        """Start it. Returns once the run has begun.

        Raises:
            PhalanxError: what ``work`` ended by before the run had begun; nothing of it is left.
        """
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()  # else what is buffered could be printed twice
        reading, writing = os.pipe()
        report, caller = tempfile.TemporaryFile(), os.getpid()  # noqa: SIM115
        pid = fork()
        if pid == 0:
            os.close(reading)
            _be_it(work, report, writing, caller)
        os.close(writing)
        made = cls(folder, pid, report)
        try:
            begun = os.read(reading, 1)
        except BaseException:  # Ctrl-C: nothing has begun
            os.kill(pid, signal.SIGKILL)
            with suppress(Exception):
                made.wait()
            raise
        finally:
            os.close(reading)
        if not begun:
            made.wait()
            raise RunError("the run ended before it had begun")
        _live.add(made)
        return made

    @property
    def running(self) -> bool:
        """Whether it goes on."""
        return not self._looked()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end, at most ``timeout`` seconds.

        Raises:
            TimeoutError: it goes on.
            WorkerError: a worker failed.
            RunError: the process was killed.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while not self._looked():
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(f"the run in {self._folder} goes on after {timeout:g} s")
            time.sleep(_SOON)
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Have it save and stop, and wait for that. Raises what ``wait`` does."""
        if not self._looked():
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)
        self.wait()

    def _looked(self) -> bool:
        """Whether it has ended, and what has become of it is known."""
        if self._ended or os.getpid() != self._owner:
            return True
        try:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
        except ChildProcessError:  # the application around us does not keep exit statuses
            pid, status = self._pid, 0
        if not pid:
            return False
        self._ended = True
        _live.discard(self)
        self._report.seek(0)
        told = self._report.read()
        self._report.close()
        if told:
            self._error = _error(json.loads(told))
        elif os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            self._error = RunError(f"the process that trained in {self._folder} was ended by {name}")
        return True


def _be_it(work: Work, report: IO[bytes], writing: int, caller: int) -> NoReturn:
    """In the forked process: train, say how it ended, and end."""
    try:
        os.setsid()  # Ctrl-C in the terminal is the caller's
        asked: list[int] = []

        def note(number: int, frame: object) -> None:
            asked.append(number)

        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, note)  # until the run heeds them itself, and once it has ended
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.set_wakeup_fd(-1)
        _live.clear()
        silence = os.open(os.devnull, os.O_RDONLY)
        os.dup2(silence, 0)
        os.close(silence)
        # the caller's own stream objects may be a notebook's, or a test's
        sys.stdout = sys.__stdout__ = printer(1)  # pyrefly: ignore[bad-assignment]
        sys.stderr = sys.__stderr__ = printer(2)  # pyrefly: ignore[bad-assignment]
        threading.Thread(target=_watch_caller, args=(caller, note, asked), daemon=True).start()

        def begun() -> None:
            os.write(writing, b"1")

        try:
            work(begun)
        except Exception as error:
            report.write(json.dumps(_told(error)).encode())
            report.flush()
        except (SystemExit, KeyboardInterrupt):
            pass  # it was asked to stop, and has
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
    finally:
        os._exit(0)


def _watch_caller(caller: int, note: Callable[[int, Any], None], asked: list[int]) -> None:
    """End this process when the caller is gone; its workers go with it.

    A signal that came before the run heeded any is sent once more when it does.
    """
    while os.getppid() == caller:
        if asked and signal.getsignal(asked[0]) is not note:
            os.kill(os.getpid(), asked.pop(0))
        time.sleep(_LOOK)
    os.kill(os.getpid(), signal.SIGKILL)


def _told(error: Exception) -> dict[str, Any]:
    worker = {name: getattr(error, name) for name in _OF_WORKER} if isinstance(error, WorkerError) else None
    return {**error_to_dict(error), "worker": worker, "notes": getattr(error, "__notes__", [])}


def _error(told: dict[str, Any]) -> Exception:
    worker = told["worker"]
    error = WorkerError(told["message"], **worker) if worker else error_from_dict(told)
    for note in told["notes"]:
        error.add_note(note)
    return error


@atexit.register
def _stop_all() -> None:
    """Of a process that ends by itself: runs in the background save and stop."""
    for run in list(_live):
        with suppress(Exception):
            run.stop()
