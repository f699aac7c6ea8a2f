"""A host that can be asked, and the programs started for it: they end with the process that asks."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import FrameType
from typing import final

from phalanx.errors import RunError
from phalanx.launch.check_hosts.host_answer import LONGEST

MOST = 50.0
"""Seconds that a check may take."""
_END = 2.0  # seconds that a program has to end by itself


@final
class CheckTime:
    """The time left for a check."""

    def __init__(self, seconds: float | None = None) -> None:
        """``seconds``: ``MOST`` if not given."""
        self._until = time.monotonic() + (MOST if seconds is None else seconds)

    @property
    def left(self) -> float:
        """Seconds; never below 0."""
        return max(0.0, self._until - time.monotonic())

    def end(self) -> None:
        """Leave no time from now on."""
        self._until = time.monotonic()


class TargetHost(ABC):
    """One machine of a launch target.

    Attributes:
        name: as the user knows it; no two hosts of a target have one name.
        address: for the other hosts; empty if the host is to find it out.
        processes: workers it is to have; 0: as many as it has devices.
        folder: of its workers; empty: the folder of the asking process.
    """

    name: str
    address: str = ""
    processes: int = 0
    folder: str = ""

    @abstractmethod
    def run(self, arguments: Sequence[str], text: str, patience: float) -> str:
        """Return the output of the workers' Python there, given ``arguments`` and ``text`` on stdin.

        Stdin stays open until the program has ended; the program ends if it closes. Several threads may call it.

        Raises:
            RunError: the program fails, or takes longer than ``patience`` seconds; the text does not name the host.
        """


@final
class ThisMachine(TargetHost):
    """The machine that asks."""

    def __init__(self, python: str = sys.executable) -> None:
        """``python``: the interpreter of workers."""
        self.name = "this machine"
        self._python = python

    def run(self, arguments: Sequence[str], text: str, patience: float) -> str:
        return run_here([self._python, *arguments], text, patience)


def run_here(command: Sequence[str], text: str, patience: float) -> str:
    """Return the output of ``command``, given ``text`` on stdin, which stays open until it has ended.

    Raises:
        RunError: there is no such program, it fails, or takes longer than ``patience`` seconds.
    """
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen([*command], bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    except OSError as error:
        raise RunError(f"{command[0]} cannot be started: {error.strerror}") from None
    with process:
        _RUNNING.add(process)
        try:
            with suppress(OSError, ValueError):  # it has ended
                process.stdin.write(text.encode())  # pyrefly: ignore
            out, err = _output(process, patience)
        finally:
            _end([process])
            _RUNNING.discard(process)
    if process.returncode:
        lines = [line for line in err.splitlines() if line.strip()]
        raise RunError(lines[-1].strip() if lines else f"{command[0]} ended with exit code {process.returncode}")
    return out


@contextmanager
def asking(hosts: Sequence[TargetHost], limit: CheckTime | None = None) -> Iterator[ThreadPoolExecutor]:
    """Give a thread to each of ``hosts``; an exception in the block ends all programs of ``run_here``."""
    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        try:
            yield pool
        except BaseException:
            if limit:
                limit.end()
            pool.shutdown(wait=False, cancel_futures=True)
            _end([*_RUNNING])
            raise


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise ``SystemExit`` for the block, on the main thread, so that it cleans up."""
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


def _output(process: subprocess.Popen[bytes], patience: float) -> tuple[str, str]:
    until, said = time.monotonic() + patience, {process.stdout: b"", process.stderr: b""}
    with selectors.DefaultSelector() as selector:
        for pipe in said:
            selector.register(pipe, selectors.EVENT_READ)  # pyrefly: ignore
        while selector.get_map():
            ready = selector.select(max(0.0, until - time.monotonic()))
            if not ready or time.monotonic() > until:
                raise RunError(f"gives no answer within {patience:.0f} s")
            for key, _ in ready:
                if data := os.read(key.fd, 2**16):
                    said[key.fileobj] = (said[key.fileobj] + data)[-LONGEST:]  # pyrefly: ignore
                else:
                    selector.unregister(key.fileobj)
    out, err = (text.decode(errors="replace") for text in said.values())
    return out, err


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + _END
    for process in processes:
        with suppress(OSError):
            process.stdin.close()  # pyrefly: ignore
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


_RUNNING: set[subprocess.Popen[bytes]] = set()
