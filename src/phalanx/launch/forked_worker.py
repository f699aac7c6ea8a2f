"""Inside a forked worker: from the moment after the fork to its last breath."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, NoReturn, TextIO

import torch

from phalanx.comm import Place
from phalanx.launch.failure import describe_error
from phalanx.launch.launcher import WorkerFunction
from phalanx.launch.torch_warmup import leave_compiler_out

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPipes:
    """A worker's connections to its launcher.

    Attributes:
        report: pipe for the result or the error, one JSON line.
        stdout: pipe that becomes the worker's standard output.
        stderr: pipe that becomes its standard error.
        steps: shared memory, one integer a rank: the step each is in, -1 before the first.
        crash: file for the traceback of a crash in compiled code.
        foreign: descriptors of the launcher that this worker must not hold open.
    """

    report: int
    stdout: int
    stderr: int
    steps: memoryview
    crash: IO[bytes]
    foreign: tuple[int, ...]


def run_worker(
    function: WorkerFunction,
    take_place: Callable[[], Place],
    pipes: WorkerPipes,
    launcher: int,
    threads: int | None = None,
) -> NoReturn:
    """Run ``function`` as this worker and end the process.

    It ends by ``os._exit``, as forked processes of Python's multiprocessing do: exit handlers and destructors that came
    along from the launcher are the launcher's business.

    Args:
        function: what to run.
        take_place: gives this worker's place, perhaps only after a while.
        pipes: to the launcher.
        launcher: the launcher's process id.
        threads: to compute with; an even share of the cores where not given.
    """
    try:
        _detach(pipes, launcher)
        try:
            place = take_place()
        except BaseException as error:
            _end(pipes, json.dumps({"error": describe_error(error)}), 1)
        _set_threads(place.world_size, threads)
        renew_autograd()
        # a store into shared memory: about 0.1 µs, no system call, so a loop may report every step
        report_step = partial(pipes.steps.__setitem__, place.rank)
        try:
            leave_compiler_out()
            report = json.dumps({"result": function(place, report_step)})
        except BaseException as error:
            # while the error still holds its frames: destructors of what they hold may wait for a lost peer
            _end(pipes, json.dumps({"error": describe_error(error)}), 1)
        _end(pipes, report, 0)
    finally:
        os._exit(1)


def _end(pipes: WorkerPipes, report: str, code: int) -> NoReturn:
    _send(pipes.report, report)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed by whoever it belonged to
            stream.flush()
    os._exit(code)


def _send(descriptor: int, report: str) -> None:
    data = memoryview(report.encode() + b"\n")
    while data:
        data = data[os.write(descriptor, data) :]


def _detach(pipes: WorkerPipes, launcher: int) -> None:
    os.setsid()  # own process group: what this worker starts can be ended with it
    die_with(launcher)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)

    for descriptor in pipes.foreign:
        os.close(descriptor)
    silence = os.open(os.devnull, os.O_RDONLY)
    for source, place in ((silence, 0), (pipes.stdout, 1), (pipes.stderr, 2)):
        os.dup2(source, place)
        os.close(source)
    # the launcher's own stream objects may be a progress bar's, or a test's
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = _printer(1)
    sys.stderr = sys.__stderr__ = _printer(2)
    faulthandler.enable(file=pipes.crash.fileno(), all_threads=False)
    # what the launcher had imported stays: out of the collector's rounds, which then neither walk nor copy those pages
    gc.freeze()


def _printer(descriptor: int) -> TextIO:
    return os.fdopen(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def die_with(launcher: int) -> None:
    """Have the kernel end this process when its launcher ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:  # it ended before the request
        os._exit(1)


def threads_each(world_size: int) -> int:
    """Threads that each of so many workers computes with: an even share of the cores, unless the user has said."""
    if "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cores // world_size)


def renew_autograd() -> None:
    """Have autograd's engine made anew in a forked process while it has one thread: to be called first of all in it.

    The first operation after a fork whose inputs are kept for backward destroys the engine of the parent and builds
    another in its place, without a lock (``PythonEngine::get_python_engine``, torch 2.13): of two threads that come to
    it together, as those of ``threads=2`` do in their first forward, one may use what the other is destroying.
    """
    leaf = torch.zeros(1, requires_grad=True)
    torch.mul(leaf, leaf)


def _set_threads(world_size: int, threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_each(world_size))
