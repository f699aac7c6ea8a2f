"""The time that a check may take, and the programs that it starts: none of them outlives whoever asked.

A program reads its question, one line of stdin, which then stays open. Where that closes before it has answered, since
whoever asked was ended or the connection to its host was cut, it ends with all that it has started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import final

from phalanx.errors import RunError

MOST = 50.0
"""Seconds that a check may take from its question to its answer."""
BOOT = """
import json, os, signal, sys, threading, time
QUESTION = json.loads(sys.stdin.readline())
LIFE = os.dup(0)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
signal.signal(signal.SIGINT, signal.default_int_handler)
def end_with_asker():
    while os.read(LIFE, 1):
        pass
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    for nap in range(20):  # each of which the clearing away has, too, where this process stands still for long
        time.sleep(0.05)
    if os.getpgrp() == os.getpid():
        os.killpg(0, 9)
    os._exit(1)
threading.Thread(target=end_with_asker, daemon=True).start()
exec(compile(QUESTION.pop("program"), "phalanx check", "exec"), {"__name__": "__main__", "QUESTION": QUESTION})
"""
"""What each program begins with there; its text comes with the question."""
_END = 2.0  # seconds that a program has to end by itself


@final
class CheckTime:
    """What is left of the time that a check may take."""

    def __init__(self, seconds: float | None = None) -> None:
        """``seconds``: ``MOST`` where not given."""
        self._until = time.monotonic() + (MOST if seconds is None else seconds)
        self._ended = False

    @property
    def left(self) -> float:
        """Seconds; never below 0."""
        return max(0.0, self._until - time.monotonic())

    def at_least(self, seconds: float) -> float:
        """What is left, or ``seconds`` where that is less; 0 once it was ended."""
        return 0.0 if self._ended else max(seconds, self.left)

    def end(self) -> None:
        """Nothing is left from now on."""
        self._until, self._ended = time.monotonic(), True


def run_here(command: Sequence[str], text: str, patience: float) -> str:
    """What ``command`` prints, given ``text`` on stdin, which stays open until it has ended.

    Raises:
        RunError: there is no such program, it fails, or it has not ended within ``patience`` seconds; what it started
            is ended, too.
    """
    started = _Started(command, text)
    with started.process, started:
        try:
            out, err = started.process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            raise RunError(f"gives no answer within {patience:.0f} s") from None
    if started.process.returncode:
        lines = [line for line in err.splitlines() if line.strip()]
        ending = f"{command[0]} ended with exit code {started.process.returncode}"
        raise RunError(lines[-1].strip() if lines else ending)
    return out


def end_started() -> None:
    """End all that ``run_here`` has started in this process, on whatever thread: each call of it then fails."""
    with _LOCK:
        running = [*_RUNNING]
    for one in running:
        one.let_go()
    until = time.monotonic() + _END
    for one in running:
        one.end(until)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP raise ``SystemExit``, so that what was begun is cleared away; on the main thread."""
    here = threading.current_thread() is threading.main_thread()
    usual = [one for one in (signal.SIGTERM, signal.SIGHUP) if here and signal.getsignal(one) is signal.SIG_DFL]
    for number in usual:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in usual:
            signal.signal(number, signal.SIG_DFL)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@final
class _Started:
    """A program, and the pipe by which it is told and lives. Leaving the block ends it."""

    def __init__(self, command: Sequence[str], text: str) -> None:
        reading, writing = os.pipe()
        self._life = open(writing, "wb", buffering=0)  # noqa: SIM115
        pipes = {"stdin": reading, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        try:
            self.process = subprocess.Popen([*command], text=True, errors="replace", start_new_session=True, **pipes)
        except OSError as error:
            self._life.close()
            raise RunError(f"{command[0]} cannot be started: {error.strerror}") from None
        finally:
            os.close(reading)
        self._telling = threading.Thread(target=self._tell, args=(text.encode(),), daemon=True)

    def __enter__(self) -> None:
        with _LOCK:
            _RUNNING.add(self)
        self._telling.start()

    def __exit__(self, *_: object) -> None:
        self.let_go()
        self.end(time.monotonic() + _END)
        self._telling.join()
        with _LOCK:
            _RUNNING.discard(self)

    def let_go(self) -> None:
        """Close its stdin, upon which it ends by itself; safe to call twice."""
        self._life.close()

    def end(self, until: float) -> None:
        """End it by force where it has not ended ``until`` then, by ``time.monotonic``."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, until - time.monotonic()))
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def _tell(self, text: bytes) -> None:
        left = memoryview(text)
        with suppress(OSError, ValueError):  # it has ended
            while left:
                left = left[self._life.write(left) :]


_LOCK = threading.Lock()
_RUNNING: set[_Started] = set()
