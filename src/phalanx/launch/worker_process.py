"""One forked process of a launch: inside it, from the moment after the fork to its last breath, and from the launcher.

What workers print goes through the launcher's ``sys.stdout`` and ``sys.stderr``, so that it never tears a progress bar
that is drawn there. Rank 0 passes through as it is; the lines of the others begin with ``[rank 1]``.
"""

from __future__ import annotations

import codecs
import ctypes
import faulthandler
import gc
import json
import os
import re
import signal
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, Literal, NoReturn, TextIO, final

import torch

from phalanx.comm import Place
from phalanx.hardware.probe import affinity
from phalanx.launch.addresses import connect_late, listen_at
from phalanx.launch.failure import Failure, describe_error, failure_of_exit
from phalanx.launch.launcher import WorkerFunction
from phalanx.launch.rank_probe import ProbeFiles, RankProbe
from phalanx.launch.reaper import kill_group
from phalanx.launch.torch_warmup import leave_compiler_out

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPipes:
    """A worker's connections to its launcher.

    Attributes:
        report: pipe for the result or the error, one JSON line.
        steps: shared memory, one integer a rank: the step each is in, -1 before the first. One more at the end: what
            the launcher asks for, as ``StepReport.asked`` gives it.
        crash: file for the traceback of a crash in compiled code.
        files: where it writes down its stacks and what it does.
        foreign: descriptors of the launcher that this worker must not hold open.
    """

    report: int
    stdout: int
    stderr: int
    steps: memoryview
    crash: IO[bytes]
    files: ProbeFiles
    foreign: tuple[int, ...]


def run_worker(
    function: WorkerFunction,
    place: Place,
    pipes: WorkerPipes,
    launcher: int,
    threads: int | None = None,
) -> NoReturn:
    """Run ``function`` as this worker and end the process.

    It ends by ``os._exit``, as forked processes of Python's multiprocessing do: exit handlers and destructors that came
    along from the launcher are the launcher's business. ``launcher`` is the launcher's process id. The worker computes
    with an even share of the cores without ``threads``.
    """
    try:
        _detach(pipes, launcher)
        show_rank(place.rank)
        leave_warnings_to_rank_0(place.rank)
        if threads is not None or "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(threads or threads_each(place.world_size))
        renew_autograd()
        probe = RankProbe(place, pipes.files)
        probe.start()
        report_step = SharedSteps(pipes.steps, place.rank, probe)
        try:
            listen_at(place.host)
            connect_late(place.world_size)
            leave_compiler_out()
            report = json.dumps({"result": function(place, report_step)})
        except BaseException as error:
            # while the error still holds its frames: destructors of what they hold may wait for a lost peer
            _end(pipes, json.dumps({"error": describe_error(error)}), 1)
        _end(pipes, report, 0)
    finally:
        os._exit(1)


@final
class SharedSteps:
    """Memory shared with the launcher: about 0.1 µs, no system call, so a loop may report every step."""

    def __init__(self, steps: memoryview, rank: int, probe: RankProbe) -> None:
        self._steps, self._rank, self._probe = steps, rank, probe

    def __call__(self, step: int, /) -> None:
        self._steps[self._rank] = step
        self._probe.report_step(step)

    def asked(self) -> int:
        return self._steps[-1]


def _end(pipes: WorkerPipes, report: str, code: int) -> NoReturn:
    data = memoryview(report.encode() + b"\n")
    while data:
        data = data[os.write(pipes.report, data) :]
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed by whoever it belonged to
            stream.flush()
    os._exit(code)


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
    sys.stdout = sys.__stdout__ = printer(1)  # pyrefly: ignore[bad-assignment]
    sys.stderr = sys.__stderr__ = printer(2)  # pyrefly: ignore[bad-assignment]
    faulthandler.enable(file=pipes.crash.fileno(), all_threads=True)
    # what the launcher had imported stays: out of the collector's rounds, which then neither walk nor copy those pages
    gc.freeze()


def printer(descriptor: int) -> TextIO:
    """A stream of this process's own that prints to ``descriptor`` line by line."""
    return os.fdopen(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def die_with(launcher: int) -> None:
    """Have the kernel end this process when its launcher ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:  # it ended before the request
        os._exit(1)


RANK_NAME = "phx-rank-"
"""What the name of a worker's process begins with, where the system keeps one; then comes its rank."""


def show_rank(rank: int) -> None:
    """Have ``ps`` and ``top`` show this process as ``phx-rank-1``; what it starts by a fork has the name, too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"{RANK_NAME}{rank}".encode(), 0, 0, 0)


_SAY_THE_SAME = r"(peft|transformers)\."


def leave_warnings_to_rank_0(rank: int) -> None:
    """Libraries warn of the model that every rank builds: only rank 0 says it, where the user has no filter for it."""
    if rank:
        warnings.filterwarnings("ignore", module=_SAY_THE_SAME, append=True)


def threads_each(world_size: int) -> int:
    """Threads that each of so many workers computes with: an even share of the cores, unless the user has said."""
    if "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    return max(1, affinity() // world_size)


def renew_autograd() -> None:
    """Have autograd's engine made anew in a forked process while it has one thread: to be called first of all in it.

    The first operation after a fork whose inputs are kept for backward destroys the engine of the parent and builds
    another in its place, without a lock (``PythonEngine::get_python_engine``, torch 2.13): of two threads that come to
    it together, as those of ``threads=2`` do in their first forward, one may use what the other is destroying.
    """
    leaf = torch.zeros(1, requires_grad=True)
    torch.mul(leaf, leaf)


_CHUNK = 65536


@final
class WorkerProcess:
    """One worker process.

    Attributes:
        result: what it returned; meaningful once it has ended without a failure.
        ended: its process is gone and everything it said has been read.
        descriptors: the launcher's ends of its pipes that are still open.
        files: where it writes down its stacks and what it does.
    """

    def __init__(self, rank: int, pid: int, pipes: list[int], files: tuple[IO[bytes], ...]) -> None:
        """``files``: for the traceback of a crash, its stacks, and what it does."""
        self.rank, self.pid = rank, pid
        self.result: Any = None
        self.ended = False
        self.failed = False
        self.descriptors = set(pipes)
        self._report_pipe, stdout, self._stderr = pipes
        self._last_words = b""
        self._relays = {stdout: OutputRelay(rank, "stdout"), self._stderr: OutputRelay(rank, "stderr")}
        self._crash, stacks, standing = self._files = files
        self.files = ProbeFiles(stacks.fileno(), standing.fileno())
        self._report = bytearray()

    @property
    def reported(self) -> bool:
        """Whether its result or error has come."""
        return self._report.endswith(b"\n")

    def read(self, descriptor: int) -> bool:
        """Take in what one of its pipes holds. Returns whether there was anything; closes the pipe at its end."""
        try:
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            os.close(descriptor)
            self.descriptors.discard(descriptor)
        elif descriptor == self._report_pipe:
            self._report += data
        else:
            self._relays[descriptor].feed(data)
            if descriptor == self._stderr:
                self._last_words = (self._last_words + data)[-_CHUNK:]
        return bool(data)

    def failure(self, step: int | None) -> Failure | None:
        """The failure it has reported, once."""
        if self.failed or not self.reported:
            return None
        report = json.loads(self._report)
        if "error" not in report:
            self.result = report["result"]
            return None
        self.failed = True
        return Failure(rank=self.rank, step=step, **report["error"])

    def reap(self) -> int | None:
        """Its exit status as of ``os.waitpid``, once it has ended; whatever it had started ends with it."""
        try:
            if hasattr(os, "waitid"):
                if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    return None
                kill_group(self.pid, signal.SIGKILL)  # while its number cannot yet be someone else's
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:  # the application around us does not keep exit statuses
            pid, status = self.pid, 0
        if pid == 0:
            return None
        for descriptor in tuple(self.descriptors):
            for _ in range(64):  # more than a pipe holds; no end is promised where a stranger still writes
                if not self.read(descriptor):
                    break
        self.ended = True
        return status

    def failure_of_exit(self, status: int, step: int | None) -> Failure | None:
        """The failure that only the way it ended tells of."""
        if self.failed or (self.reported and status == 0):
            return None
        self.failed = True
        self._crash.seek(0)
        traceback = self._crash.read().decode(errors="replace")
        said = self._last_words.decode(errors="replace")
        return failure_of_exit(self.rank, step, os.waitstatus_to_exitcode(status), traceback, said)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()
        for relay in self._relays.values():
            relay.close()
        for file in self._files:
            file.close()


_LONGEST_LINE = 65536
# Of a known length or not: "50%|##  | 2/4 [00:01<00:01", "12 examples [00:01, 9 examples/s]".
_PROGRESS_BAR = re.compile(r"(\d+%\|.*\| *\S+/\S+|\b[\d.]+\w* ?\w*) \[\d+:[\d:]+[<,]")


def _is_progress_bar(line: str) -> bool:
    """Whether a line is what is left of a bar that was drawn over itself, as tqdm does."""
    return "\r" in line and all(_PROGRESS_BAR.search(part) for part in line.split("\r") if part.strip())


@final
class OutputRelay:
    """One stream of one worker. Progress bars of tqdm are those of rank 0; the others draw the same."""

    def __init__(self, rank: int, stream: Literal["stdout", "stderr"]) -> None:
        self._prefix = f"[rank {rank}] " if rank else ""
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._line = ""

    def feed(self, data: bytes) -> None:
        """Pass on what has come: at once for rank 0, in whole lines for the others."""
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
        with suppress(OSError):  # whoever reads it has seen enough, or its terminal is closed: the run goes on
            try:
                target.write(text)
            except UnicodeEncodeError:
                target.write(text.encode("ascii", "backslashreplace").decode("ascii"))
            target.flush()
