"""A forked process beside this one that works something out, sends what it finds, and never outlives it; and one use.

``look_ahead`` finds in such a process what a job under a plan is refused for, and what workers need not look for again.
Looking builds the model and runs it on a few samples. A forked process does that, so that this one stays as it was: its
random numbers, modules that the job shares with it, and CUDA, which workers are forked without. What is worth knowing
but need not be waited for, a run's forecast, that process makes afterwards of the model that it has.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self, final

import torch

from phalanx.config import Job, Plan
from phalanx.errors import DataError, GradientError, LossError, Problem, RefusedError, SpecError
from phalanx.launch.reaper import fork, kill_group
from phalanx.launch.torch_warmup import leave_compiler_out, make_ready_to_look
from phalanx.launch.worker_process import die_with, renew_autograd
from phalanx.train.findings import Findings
from phalanx.train.look_ahead import look
from phalanx.train.lr_schedule import START, RunStart

Send = Callable[[dict[str, Any]], None]

_CHUNK = 65536
_SPARE = 15  # niceness: about a thirtieth of a core that others want, too


@final
class SideProcess:
    """Runs ``work(send)`` in a forked process whose output goes nowhere.

    Leaving the block ends it. ``send`` takes a message, a dictionary that can be JSON. The process computes on one
    thread only and ends with its launcher.
    """

    def __init__(self, work: Callable[[Send], None]) -> None:
        reading, writing = os.pipe()
        launcher = os.getpid()
        self._pid = fork()
        if self._pid == 0:
            os.close(reading)
            _run(work, writing, launcher)
        os.close(writing)
        self._reading: int | None = reading
        self._text = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def done(self) -> bool:
        """Whether no more messages will come."""
        return self._reading is None and b"\n" not in self._text

    @property
    def ended_by(self) -> int:
        """Signal that ended the process, once ``done``; 0 if it ended by itself."""
        ended = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
        return ended.si_status if ended and ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED) else 0

    def next(self, timeout: float = 0.0) -> dict[str, Any] | None:
        """Its next message; ``None`` where none comes within so many seconds, or any more."""
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
        line, newline, rest = self._text.partition(b"\n")
        if not newline:
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


def _run(work: Callable[[Send], None], writing: int, launcher: int) -> NoReturn:
    try:
        os.setsid()
        die_with(launcher)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        sys.stdout = sys.stderr = open(nowhere, "w", closefd=False)  # noqa: SIM115
        torch.set_num_threads(1)  # the one number that is safe whatever the launcher has computed before
        renew_autograd()

        def send(message: dict[str, Any]) -> None:
            os.write(writing, json.dumps(message).encode() + b"\n")

        work(send)
    finally:
        os._exit(0)


def take_spare_time() -> None:
    """Have this process take hardly more time from now on than others leave it."""
    os.nice(_SPARE)
    with suppress(OSError):  # Linux shares time out among sessions first, if it groups processes by them
        Path("/proc/self/autogroup").write_text(str(_SPARE))


Afterwards = Callable[[Findings, Send], None]
"""What the process that has looked does then: given what it found, it sends messages."""

_REFUSED_IN_FIRST_STEP = (LossError, GradientError, DataError)
_PATIENCE = 60.0  # seconds that a run waits for the look; workers look at a model that takes longer to build


def look_ahead(job: Job, plan: Plan, start: RunStart = START, patience: float = _PATIENCE) -> Findings:
    """What there is to be found of ``job`` under ``plan`` before it runs, such as causes of a difference.

    Nothing where it cannot be looked at, or not within ``patience`` seconds. ``start`` says how the run begins that it
    is for.

    Raises:
        RefusedError: if the model, the optimizer or the data are such that the plan cannot serve the job.
        SpecError: if the job's functions fail, or give something else than they must.
        LossError: if the loss is of a wrong form.
        GradientError: if parameters get no gradient, or the optimizer holds others than it was given.
    """
    with LookAhead(job, plan, start) as look:
        return look.findings(patience)


@final
class LookAhead:
    """``look_ahead`` while this process does something else; leaving the block ends it.

    Attributes:
        side: the process, for what it sends ``afterwards``.
    """

    def __init__(self, job: Job, plan: Plan, start: RunStart = START, afterwards: Afterwards | None = None) -> None:
        make_ready_to_look(plan)
        self.side = SideProcess(partial(_look, partial(look, job, plan, start), afterwards))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.side.close()

    def findings(self, patience: float = _PATIENCE) -> Findings:
        """What was found; waits for it ``patience`` seconds. To be called once. Raises what ``look_ahead`` does."""
        message = self.side.next(patience)
        return _findings((message or {}).get("look", {}))


def _findings(answer: dict[str, Any]) -> Findings:
    if problems := answer.get("problems"):
        kind = RefusedError if answer["kind"] == RefusedError.__name__ else SpecError
        raise kind(Problem(**problem) for problem in problems)
    if "message" in answer:
        error = next(kind for kind in _REFUSED_IN_FIRST_STEP if kind.__name__ == answer["kind"])(answer["message"])
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
    except SpecError as error:
        answer = {"kind": type(error).__name__, "problems": [asdict(problem) for problem in error.problems]}
    except _REFUSED_IN_FIRST_STEP as error:
        answer = {"kind": type(error).__name__, "message": str(error)}
    except Exception:  # the job's own error, which a worker shows with its traceback
        answer = {}
    send({"look": answer})
    if afterwards:
        afterwards(found, send)
