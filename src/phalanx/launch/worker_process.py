"""The code of a forked worker, from the fork to its exit, and the relay of its output.

The launcher prints the output of workers to its own ``sys.stdout`` and ``sys.stderr``, so that it never tears a
progress bar there. The output of rank 0 passes as it is; the lines of the others begin with ``[rank 1]``.
"""

from __future__ import annotations

import codecs
import faulthandler
import gc
import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TextIO, final

import torch

from phalanx.comm import Place
from phalanx.config import RunSpec
from phalanx.config.run import TIMEOUT
from phalanx.hardware.probe import affinity
from phalanx.launch.addresses import connect_late, listen_at
from phalanx.launch.failure import describe_error
from phalanx.launch.hangs import HangProbe
from phalanx.launch.reaper import die_with, prctl
from phalanx.launch.torch_warmup import leave_compiler_out
from phalanx.launch.torchrun import FORKED

_PR_SET_NAME = 15


@final
class StepReport:
    """Called by a worker with the number of each optimizer step that it begins.

    Memory shared with the launcher: about 0.1 µs, no system call, so a loop may report every step.
    """

    def __init__(self, steps: memoryview, rank: int, probe: HangProbe) -> None:
        self._steps, self._rank, self._probe = steps, rank, probe

    def __call__(self, step: int, /) -> None:
        self._steps[self._rank] = step
        self._probe.report_step(step)

    def asked(self) -> int:
        """Return the number of the signal by which the launcher asks to stop, or 0."""
        return self._steps[-1]


WorkerFunction = Callable[[Place, StepReport], Any]
"""The function of a forked worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A number of workers to start.

    Attributes:
        function: run by each worker. Its result must be JSON.
        run: the run that they train; ``None`` if ``function`` is no run.
        threads: for each worker; its share of this machine's cores if ``None``.
    """

    world_size: int
    function: WorkerFunction
    run: RunSpec | None = None
    threads: int | None = None
    timeout: float = TIMEOUT


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPipes:
    """A worker's connections to its launcher.

    Attributes:
        report: pipe for the result or the error, one JSON line.
        steps: shared memory: the step of each rank, -1 before the first; then the number of a stop signal, 0 for none.
        stacks: file that this worker writes its stacks into, and the traceback of a crash in compiled code.
        foreign: descriptors of the launcher that this worker closes.
    """

    report: int
    stdout: int
    stderr: int
    steps: memoryview
    stacks: int
    foreign: tuple[int, ...]


def run_worker(
    function: WorkerFunction, place: Place, pipes: WorkerPipes, launcher: int, threads: int | None = None
) -> NoReturn:
    """Run ``function`` as this worker and end the process by ``os._exit``, without the launcher's exit handlers.

    ``launcher`` is the launcher's process id. Without ``threads`` the worker computes with an even share of the cores.
    """
    try:
        for descriptor in pipes.foreign:
            os.close(descriptor)
        detach(launcher, pipes.stdout, pipes.stderr)
        faulthandler.enable(file=pipes.stacks, all_threads=True)
        gc.freeze()  # the collector then neither walks nor copies the pages that are shared with the launcher
        show_rank(place.rank)
        leave_warnings_to_rank_0(place.rank)
        if threads is not None or "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(threads or threads_each(place.world_size))
        renew_autograd()
        os.environ.update(torchrun_variables(place))
        probe = HangProbe(place, pipes.stacks)
        try:
            listen_at(place.host)
            connect_late(place.world_size)
            leave_compiler_out()
            report = json.dumps({"result": function(place, StepReport(pipes.steps, place.rank, probe))})
        except BaseException as error:
            # while the error still holds its frames: destructors of what they hold may wait for a lost peer
            _end(pipes, json.dumps({"error": describe_error(error)}), 1)
        _end(pipes, report, 0)
    finally:
        os._exit(1)


def torchrun_variables(place: Place) -> dict[str, str]:
    """Return the variables that torchrun sets in a worker, for libraries that look for their rank there."""
    address, _, port = place.store.removeprefix("tcp://").rpartition(":")
    values = {
        "RANK": place.rank,
        "WORLD_SIZE": place.world_size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_world_size,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        FORKED: 1,
    }
    return {name: str(value) for name, value in values.items()}


def _end(pipes: WorkerPipes, report: str, code: int) -> NoReturn:
    data = memoryview(report.encode() + b"\n")
    while data:
        data = data[os.write(pipes.report, data) :]
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed by whoever it belonged to
            stream.flush()
    os._exit(code)


def detach(launcher: int | None, stdout: int = 1, stderr: int = 2) -> None:
    """Give a process that was just forked a session, signal handlers and streams of its own.

    ``launcher``: the process id of the one that it ends with, if its forking thread lives as long.
    """
    os.setsid()  # own process group: processes that this one starts can be ended with it
    if launcher:
        die_with(launcher)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    silence = os.open(os.devnull, os.O_RDONLY)
    for source, place in ((silence, 0), (stdout, 1), (stderr, 2)):
        if source != place:
            os.dup2(source, place)
            os.close(source)
    # the launcher's own stream objects may be a progress bar's, a notebook's, or a test's
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = _printer(1)  # pyrefly: ignore[bad-assignment]
    sys.stderr = sys.__stderr__ = _printer(2)  # pyrefly: ignore[bad-assignment]


def _printer(descriptor: int) -> TextIO:
    return os.fdopen(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


RANK_NAME = "phx-rank-"
"""The name of a worker's process in ``ps`` and ``top``, before its rank."""


def show_rank(rank: int) -> None:
    """Have ``ps`` and ``top`` show this process as ``phx-rank-1``, and those that it forks."""
    prctl(_PR_SET_NAME, f"{RANK_NAME}{rank}".encode())


_SAY_THE_SAME = r"(peft|transformers)\."


def leave_warnings_to_rank_0(rank: int) -> None:
    """Ignore warnings of libraries about the model on ranks above 0, unless the user has a filter for them."""
    if rank:
        warnings.filterwarnings("ignore", module=_SAY_THE_SAME, append=True)


def threads_each(world_size: int) -> int:
    """Return the threads that each worker computes with: an even share of the cores, or ``OMP_NUM_THREADS``."""
    if "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    return max(1, affinity() // world_size)


def renew_autograd() -> None:
    """Build autograd's engine anew in a forked process, while it has one thread.

    The first operation after a fork whose inputs are kept for backward destroys the engine of the parent and builds
    another without a lock (``PythonEngine::get_python_engine``, torch 2.13), where two threads could meet.
    """
    leaf = torch.zeros(1, requires_grad=True)
    torch.mul(leaf, leaf)


_LONGEST_LINE = 65536
# Of a known length or not: "50%|##  | 2/4 [00:01<00:01", "12 examples [00:01, 9 examples/s]".
_PROGRESS_BAR = re.compile(r"(\d+%\|.*\| *\S+/\S+|\b[\d.]+\w* ?\w*) \[\d+:[\d:]+[<,]")


@final
class OutputRelay:
    """One stream of one worker. Only rank 0 shows progress bars of tqdm."""

    def __init__(self, rank: int, stream: Literal["stdout", "stderr"]) -> None:
        self._prefix, self._stream, self._line = f"[rank {rank}] " if rank else "", stream, ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def feed(self, data: bytes) -> None:
        """Print ``data``: at once for rank 0, in whole lines for the others."""
        text = self._decoder.decode(data)
        if not self._prefix:
            self._write(text)
            return
        *whole, self._line = (self._line + text).split("\n")
        if len(self._line) > _LONGEST_LINE:
            whole, self._line = [*whole, self._line], ""
        self._write("".join(f"{self._prefix}{line}\n" for line in whole if not _is_progress_bar(line)))

    def close(self) -> None:
        if self._line and not _is_progress_bar(self._line):
            self._write(f"{self._prefix}{self._line}\n")
        self._line = ""

    def _write(self, text: str) -> None:
        # looked up each time: a progress bar replaces sys.stdout while it lives
        target = sys.stdout if self._stream == "stdout" else sys.stderr
        if target is None or not text:  # pyrefly: ignore
            return
        with suppress(OSError):  # a reader that has seen enough, or a closed terminal, ends no run
            try:
                target.write(text)
            except UnicodeEncodeError:
                target.write(text.encode("ascii", "backslashreplace").decode("ascii"))
            target.flush()


def _is_progress_bar(line: str) -> bool:
    return "\r" in line and all(_PROGRESS_BAR.search(part) for part in line.split("\r") if part.strip())
