"""Forked processes beside this one that send messages and never outlive it: a look at a job, a run in the background.

``look_ahead`` finds in such a process why a plan refuses a job, and facts that workers need not find again. Looking
builds the model and runs it on a few samples. The fork keeps this process as it was: its random numbers, modules that
the job shares with it, and CUDA. The forecast of a run is made afterwards in the same process, of the same model.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn, Self, final

import torch

from phalanx.config import Job, Plan
from phalanx.errors import (
    DataError,
    GradientError,
    LossError,
    PhalanxError,
    RefusedError,
    RunError,
    SpecError,
    WorkerError,
    error_from_dict,
    error_to_dict,
)
from phalanx.launch.reaper import StopRequest, fork, ignore_signal, kill_group
from phalanx.launch.torch_warmup import leave_compiler_out, make_ready_to_look
from phalanx.launch.worker_process import detach, renew_autograd
from phalanx.train.findings import Findings
from phalanx.train.look_ahead import look
from phalanx.train.lr_schedule import START, RunStart

Send = Callable[[dict[str, Any]], None]

_SPARE = 15  # niceness: about a thirtieth of a core that others want, too
_LOOK = 0.2  # seconds between looks at whether the launcher is still there
_SOON = 0.02  # seconds between looks at whether a background run has ended


@final
class SideProcess:
    """A forked process that runs ``work(send)``. Leaving the block ends it.

    ``send`` takes a message, a dictionary that can be JSON. The process ends with its launcher.
    """

    def __init__(self, work: Callable[[Send], None], *, shown: bool = False) -> None:
        """``shown``: its output goes where this process's does, and it computes with all threads; else to nowhere."""
        self._messages, writing = Pipe(duplex=False)
        launcher = os.getpid()
        self.done = False  # True once no more messages will come
        self.pid = fork()
        if self.pid == 0:
            self._messages.close()
            _run(work, writing, launcher, shown)
        writing.close()
        self._status: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def next(self, timeout: float | None = 0.0) -> dict[str, Any] | None:
        """Return its next message; ``None`` if there is none within ``timeout`` seconds, or any more."""
        try:
            return json.loads(self._messages.recv_bytes()) if not self.done and self._messages.poll(timeout) else None
        except (EOFError, OSError):  # the second: it was killed within a message
            self.done = True
            return None

    def exit_code(self) -> int | None:
        """Return its exit code once it has ended, negative for a signal; ``None`` before."""
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # the application around us does not keep exit statuses
                pid, status = self.pid, 0
            self._status = status if pid else None
        return None if self._status is None else os.waitstatus_to_exitcode(self._status)

    def close(self) -> None:
        """End the process and those that it started; safe to call twice."""
        self.done = True
        self._messages.close()
        if self._status is None:
            kill_group(self.pid, signal.SIGKILL)
            self._status = 0
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)


def _run(work: Callable[[Send], None], writing: Connection, launcher: int, shown: bool) -> NoReturn:
    try:
        if shown:
            detach(None)
            threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()
        else:
            detach(launcher, *(os.open(os.devnull, os.O_WRONLY) for _ in range(2)))
            torch.set_num_threads(1)  # the one number that is safe whatever the launcher has computed before
            renew_autograd()
        work(lambda message: writing.send_bytes(json.dumps(message).encode()))
    finally:
        os._exit(0)


def _end_with(launcher: int) -> None:
    """End this process when its launcher is gone, whichever of the launcher's threads forked it."""
    while os.getppid() == launcher:
        time.sleep(_LOOK)
    os.kill(os.getpid(), signal.SIGKILL)


def take_spare_time() -> None:
    """Give this process the lowest priority."""
    os.nice(_SPARE)
    with suppress(OSError):  # Linux shares time out among sessions first, if it groups processes by them
        Path("/proc/self/autogroup").write_text(str(_SPARE))


Afterwards = Callable[[Findings, Send], None]
"""Work of the process after its look: given its findings, it sends messages."""

_REFUSED = (SpecError, LossError, GradientError, DataError)
_PATIENCE = 60.0  # seconds that a run waits for the look; workers look at a model that takes longer to build


def look_ahead(job: Job, plan: Plan, start: RunStart = START, patience: float = _PATIENCE) -> Findings:
    """Return facts about ``job`` under ``plan`` before it runs, such as causes of a difference.

    The findings are empty if the look fails or takes longer than ``patience`` seconds. ``start``: the start of the run.

    Raises:
        RefusedError: the plan cannot serve the job's model, optimizer or data.
        SpecError: a function of the job fails, or returns a wrong type.
        LossError: the loss is of a wrong form.
        GradientError: parameters get no gradient, or the optimizer holds others than it was given.
    """
    with LookAhead(job, plan, start) as look:
        return look.findings(patience)


@final
class LookAhead:
    """``look_ahead`` while this process does something else. Leaving the block ends it.

    Attributes:
        side: the process, for the messages of ``afterwards``.
    """

    def __init__(self, job: Job, plan: Plan, start: RunStart = START, afterwards: Afterwards | None = None) -> None:
        make_ready_to_look(plan)
        self.side = SideProcess(partial(_look, partial(look, job, plan, start), afterwards))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.side.close()

    def findings(self, patience: float = _PATIENCE) -> Findings:
        """Wait for the findings, at most ``patience`` seconds. Call it once. Raises as ``look_ahead``."""
        answer = (self.side.next(patience) or {}).get("look", {})
        if "error" in answer:
            error = error_from_dict(answer["error"])
            assert isinstance(error, PhalanxError)
            error.exit_code = RefusedError.exit_code  # nothing has run
            raise error
        return Findings.from_dict(answer)


def _look(looking: Callable[[], Findings], afterwards: Afterwards | None, send: Send) -> None:
    """Look, send what was found, and go on."""
    leave_compiler_out()
    found, answer = Findings(), dict[str, Any]()
    try:
        found = looking()
        answer = found.to_dict()
    except _REFUSED as error:
        answer = {"error": error_to_dict(error)}
    except Exception:  # the job's own error, which a worker shows with its traceback
        answer = {}
    send({"look": answer})
    if afterwards:
        afterwards(found, send)


Work = Callable[[Callable[[], None]], None]
"""Trains; calls its argument once the run has begun."""

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
