"""A process beside the workers: works something out while they run, tells of it in lines, and never outlives them."""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, Self, final

import torch

from phalanx.launch.forked_worker import die_with, renew_autograd
from phalanx.launch.reaper import fork, kill_group

Say = Callable[[dict[str, Any]], None]

_CHUNK = 65536
_LESS_URGENT = 5


@final
class Aside:
    """Runs ``work(say)`` in a forked process, a little less urgent than others, whose output goes nowhere.

    Leaving the block ends it. ``say`` takes what is to be told, as JSON. The process computes on one thread only and
    ends with its launcher.
    """

    def __init__(self, work: Callable[[Say], None]) -> None:
        reading, writing = os.pipe()
        launcher = os.getpid()
        self._pid = fork()
        if self._pid == 0:
            os.close(reading)
            _live(work, writing, launcher)
        os.close(writing)
        self._reading: int | None = reading
        self._text = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def done(self) -> bool:
        """Whether nothing more will be told."""
        return self._reading is None and b"\n" not in self._text

    def next(self, timeout: float = 0.0) -> dict[str, Any] | None:
        """What it tells next; ``None`` where nothing comes within so many seconds, or any more."""
        until = time.monotonic() + timeout
        while b"\n" not in self._text and self._reading is not None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._reading, selectors.EVENT_READ)
                if not selector.select(max(0.0, until - time.monotonic())):
                    return None
            data = os.read(self._reading, _CHUNK)
            self._text += data
            if not data:
                os.close(self._reading)
                self._reading = None
        line, found, rest = self._text.partition(b"\n")
        if not found:
            return None
        self._text = rest
        return json.loads(line)

    def close(self) -> None:
        """End the process with all that it started; safe to call twice."""
        if self._reading is not None:
            os.close(self._reading)
            self._reading = None
        if self._pid:
            kill_group(self._pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self._pid, 0)
            self._pid = 0


def _live(work: Callable[[Say], None], writing: int, launcher: int) -> NoReturn:
    try:
        os.setsid()
        die_with(launcher)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        os.nice(_LESS_URGENT)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        sys.stdout = sys.stderr = open(nowhere, "w", closefd=False)  # noqa: SIM115
        torch.set_num_threads(1)  # the one number that is safe whatever the launcher has computed before
        renew_autograd()

        def say(told: dict[str, Any]) -> None:
            os.write(writing, json.dumps(told).encode() + b"\n")

        work(say)
    finally:
        os._exit(0)
