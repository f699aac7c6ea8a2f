"""One process of a launch, seen from the launcher: its pipes, its report, its end, and what it prints.

What workers print, passed on by the launcher. Everything goes through the launcher's ``sys.stdout`` and ``sys.stderr``,
so that it never tears a progress bar that is drawn there. Rank 0 passes through as it is; the lines of the others begin
with ``[rank 1]``.
"""

from __future__ import annotations

import codecs
import json
import os
import signal
import struct
import sys
from contextlib import suppress
from typing import IO, Any, Literal, final

from phalanx.launch.failure import Failure, failure_of_exit
from phalanx.launch.reaper import kill_group

_CHUNK = 65536
_ASSIGNMENT = struct.Struct("=ii")


@final
class WorkerProcess:
    """One worker process.

    Attributes:
        result: what it returned; meaningful once it has ended without a failure.
        ended: its process is gone and everything it said has been read.
        descriptors: the launcher's ends of its pipes that are still open.
        assignment: the launcher's end of the pipe that gives a reserve its rank; -1 where there is none.
    """

    def __init__(self, rank: int, pid: int, pipes: list[int], assignment: int, crash: IO[bytes]) -> None:
        self.pid = pid
        self.result: Any = None
        self.ended = False
        self.failed = False
        self.descriptors = set(pipes)
        self.assignment = assignment
        self._report_pipe, self._stdout, self._stderr = pipes
        self._relays: dict[int, OutputRelay] = {}
        self._crash = crash
        self._report = bytearray()
        self._take_rank(rank)

    def assign(self, rank: int, generation: int) -> None:
        """Have this reserve be the worker ``rank``; ``generation`` counts its processes from 0."""
        self._take_rank(rank)
        with suppress(BrokenPipeError):  # it has just ended: who listens to it will see that
            os.write(self.assignment, _ASSIGNMENT.pack(rank, generation))

    def _take_rank(self, rank: int) -> None:
        self.rank = rank
        for relay in self._relays.values():
            relay.close()
        self._relays = {self._stdout: OutputRelay(rank, "stdout"), self._stderr: OutputRelay(rank, "stderr")}

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
        return failure_of_exit(self.rank, step, os.waitstatus_to_exitcode(status), traceback)

    def close(self) -> None:
        """Let go of its pipes and files."""
        for descriptor in (*self.descriptors, self.assignment):
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptors.clear()
        self.assignment = -1
        for relay in self._relays.values():
            relay.close()
        self._crash.close()


def await_assignment(reading: int) -> tuple[int, int]:
    """In a reserve: wait for its rank, and which of that rank's processes it is. Ends it where none will come."""
    message = os.read(reading, _ASSIGNMENT.size)
    if len(message) < _ASSIGNMENT.size:
        os._exit(0)
    rank, generation = _ASSIGNMENT.unpack(message)
    return rank, generation


_LONGEST_LINE = 65536


@final
class OutputRelay:
    """One stream of one worker."""

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
        if whole:
            self._write("".join(f"{self._prefix}{line}\n" for line in whole))

    def close(self) -> None:
        """Pass on an unfinished last line."""
        if self._line:
            self._write(f"{self._prefix}{self._line}\n")
            self._line = ""

    def _write(self, text: str) -> None:
        # looked up each time: a progress bar replaces sys.stdout while it lives
        target = sys.stdout if self._stream == "stdout" else sys.stderr
        if target is None or not text:  # pyright: ignore[reportUnnecessaryComparison]
            return
        try:
            target.write(text)
        except UnicodeEncodeError:
            target.write(text.encode("ascii", "backslashreplace").decode("ascii"))
        target.flush()
