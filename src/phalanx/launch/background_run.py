"""A run in the background: a forked process that starts the run's workers, follows them, and ends with this process."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, final

from phalanx.errors import RunError, WorkerError, error_from_dict, error_to_dict
from phalanx.launch.reaper import StopRequest, ignore_signal
from phalanx.launch.side_process import Send, SideProcess

Work = Callable[[Callable[[], None]], None]
"""Trains; calls its argument once the run has begun."""

_SOON = 0.02  # seconds between looks at whether it has ended
_OF_WORKER = ("rank", "step", "kind", "traceback", "exit_code")

_live: set[BackgroundRun] = set()


@final
class BackgroundRun:
    """The process of one run that this process has started."""

    def __init__(self, folder: Path, side: SideProcess) -> None:
        self._folder, self._side, self._owner = folder, side, os.getpid()
        self._ended = False
        self._error: Exception | None = None

    @classmethod
    def begin(cls, folder: Path, work: Work) -> BackgroundRun:
        """Start the process. Return once the run has begun.

        Raises:
            PhalanxError: ``work`` failed before the run had begun; nothing of the run is left.
        """
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()  # else buffered text could be printed twice
        made = cls(folder, SideProcess(partial(_train, work), shown=True))
        try:
            first = made._side.next(None)
        except BaseException:  # Ctrl-C: nothing has begun
            made._side.close()
            raise
        if first != {}:
            made._take(first)
            made.wait()
            raise RunError("the run ended before it had begun")
        _live.add(made)
        return made

    @property
    def running(self) -> bool:
        """True until the process has ended."""
        return not self._look()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end of the run, at most ``timeout`` seconds.

        Raises:
            TimeoutError: it has not ended.
            WorkerError: a worker failed.
            RunError: the process was killed.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while not self._look():
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(f"the run in {self._folder} goes on after {timeout:g} s")
            time.sleep(_SOON)
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Have the run save and stop, and wait for its end. Raises as ``wait``."""
        if not self._look():
            with suppress(ProcessLookupError):
                os.kill(self._side.pid, signal.SIGTERM)
        self.wait()

    def _look(self) -> bool:
        """Return True if the process has ended; its error is known then."""
        if self._ended or os.getpid() != self._owner:
            return True
        code = self._side.exit_code()
        if code is None:
            return False
        self._ended = True
        _live.discard(self)
        self._take(self._side.next())
        self._side.close()
        if code < 0 and self._error is None:
            name = signal.Signals(-code).name
            self._error = RunError(f"the process that trained in {self._folder} was ended by {name}")
        return True

    def _take(self, message: dict[str, Any] | None) -> None:
        if message:
            worker = message["worker"]
            self._error = WorkerError(message["message"], **worker) if worker else error_from_dict(message)
            for note in message["notes"]:
                self._error.add_note(note)


def _train(work: Work, send: Send) -> None:
    """In the forked process: train. Send an empty message once the run has begun, and the error that it ends by."""
    _live.clear()
    with StopRequest(ignore_signal):  # signals before the run heeds them itself, and once it has ended
        try:
            work(partial(send, {}))
        except Exception as error:
            worker = {name: getattr(error, name) for name in _OF_WORKER} if isinstance(error, WorkerError) else None
            send({**error_to_dict(error), "worker": worker, "notes": getattr(error, "__notes__", [])})
        except (SystemExit, KeyboardInterrupt):
            pass  # it was asked to stop, and has
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()


@atexit.register
def _stop_all() -> None:
    """Have runs in the background save and stop when this process ends by itself."""
    for run in list(_live):
        with suppress(Exception):
            run.stop()
