"""All workers of one launch, seen from the launcher: forked, listened to, ended.

Two things make it safe to fork a process that has imported torch:

* **OpenMP.** GNU OpenMP keeps a pool of threads for each *thread* that entered a parallel region. A process forked
  from a thread that has such a pool inherits the pool's record but not its threads, and hangs in its first parallel
  region (seen with torch 2.13: a backward on 2 threads in the parent, fork, a matrix product on 2 threads in the
  child; it also hangs where the child asks for 2 threads again, and only asking for 1 helps). A thread that never
  computed has no pool. So workers are forked from a fresh thread that does nothing else, and may then use any number of
  threads, whatever the launcher computed before. Python makes the forking thread the child's main thread; it is
  started by ``_thread`` because only then is it a real ``_MainThread`` there, without which torch's DataLoader does not
  watch its processes.
* **CUDA** does not survive a fork at all; ``local.py`` refuses a launcher that already uses it. One that only asked
  ``torch.cuda.is_available()`` looks as if it had not; its workers can tell, in ``device_for``.

The forking thread lives as long as the workers: the kernel binds the parent-death signal to the thread that forked.
"""

from __future__ import annotations

import _thread
import json
import mmap
import os
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from typing import IO, Any, Protocol, final

import torch.distributed as dist

from phalanx.comm import Place
from phalanx.errors import RunError
from phalanx.launch.child import Target, Wires, live
from phalanx.launch.failure import Failure, signal_name
from phalanx.launch.guard import Guardian, fork, kill_group
from phalanx.launch.relay import Relay

# seconds; together they stay well under the 3 s in which everything has to be over
_SETTLE = 0.3  # after a failure, for reports of ranks that failed at the same time
_SETTLE_LOST = 1.0  # the same, while all that is known is that peers were lost
_GRACE = 0.5  # between SIGTERM and SIGKILL
_KILL = 1.0  # after SIGKILL
_SOON = 0.002  # between looks at a worker that has reported and is about to end

_CHUNK = 65536
_NO_STEP = -1


class Hosts(Protocol):
    """Machines, or what stands in for them, that workers are put on; the launcher stays where it is."""

    @property
    def meeting(self) -> str:
        """The launcher's address, which every worker reaches."""
        ...

    def enter(self, rank: int) -> str:
        """Called by the worker ``rank`` as the first thing it does: puts it on its machine. Returns its address."""
        ...


@final
class Worker:
    """One worker process.

    Attributes:
        result: what it returned; meaningful once it has ended without a failure.
        ended: its process is gone and everything it said has been read.
        descriptors: the launcher's ends of its pipes that are still open.
    """

    def __init__(self, rank: int, pid: int, pipes: list[int], crash: IO[bytes]) -> None:
        self.rank = rank
        self.pid = pid
        self.result: Any = None
        self.ended = False
        self.failed = False
        self.descriptors = set(pipes)
        self._report_pipe, stdout, stderr = pipes
        self._relays = {stdout: Relay(rank, "stdout"), stderr: Relay(rank, "stderr")}
        self._crash = crash
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
        code = os.waitstatus_to_exitcode(status)
        self._crash.seek(0)
        return Failure(
            rank=self.rank,
            step=step,
            kind=f"signal {-code}" if code < 0 else f"exit {code}",
            message=signal_name(-code) if code < 0 else "the process ended without a result",
            traceback=self._crash.read().decode(errors="replace"),
            time=time.monotonic(),
            signal=max(0, -code),
        )

    def close(self) -> None:
        """Let go of its pipes and files."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()
        for relay in self._relays.values():
            relay.close()
        self._crash.close()


@final
class Crew:
    """All workers of one launch.

    Attributes:
        workers: in rank order.
        failures: in the order they became known, up to the moment the launch began to end the workers.
    """

    def __init__(self, target: Target, world_size: int, hosts: Hosts | None = None) -> None:
        self.workers: list[Worker] = []
        self.failures: list[Failure] = []
        self._target: Target | None = target
        self._world_size = world_size
        self._steps = memoryview(mmap.mmap(-1, 8 * world_size)).cast("q")
        for rank in range(world_size):
            self._steps[rank] = _NO_STEP
        # bound before the fork, so that its port is known; served after it, so that no server thread is forked
        self._hosts = hosts
        self._address = hosts.meeting if hosts else "127.0.0.1"
        self._listener = socket.create_server((self._address, 0), backlog=max(128, 2 * world_size))
        self._port: int = self._listener.getsockname()[1]
        self._store: object = None
        self._guardian: Guardian | None = None
        self._selector = selectors.DefaultSelector()
        self._forked = threading.Event()
        self._over = threading.Event()
        self._trouble: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether every worker has ended."""
        return all(worker.ended for worker in self.workers)

    def start(self) -> None:
        """Fork the workers and serve the store they meet at."""
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # pyright: ignore[reportUnnecessaryComparison]
                stream.flush()  # else what is buffered could be printed once more by each worker
        _thread.start_new_thread(self._fork_all, ())
        self._forked.wait()
        for worker in self.workers:
            for descriptor in worker.descriptors:
                self._selector.register(descriptor, selectors.EVENT_READ, worker)
        if self._trouble:
            raise RunError(
                f"could not start worker {len(self.workers)} of {self._world_size}: {self._trouble}\n    try: "
                "fewer ranks, such as -n 1; or a higher limit of processes (ulimit -u) or open files (ulimit -n)"
            ) from self._trouble
        self._store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            self._address,
            self._port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(minutes=10),
            master_listen_fd=self._listener.detach(),
        )

    def listen(self, timeout: float) -> None:
        """Take in what the workers say and how they end, for at most ``timeout`` seconds."""
        if any(worker.reported and not worker.ended for worker in self.workers):
            timeout = min(timeout, _SOON)
        for key, _ in self._selector.select(timeout):
            worker: Worker = key.data
            worker.read(key.fd)
            if key.fd not in worker.descriptors:
                self._selector.unregister(key.fd)
        for worker in self.workers:
            if worker.ended:
                continue
            open_before = tuple(worker.descriptors)
            status = worker.reap()
            if failure := worker.failure(self._step(worker)):
                self.failures.append(failure)
            if status is None:
                continue
            for descriptor in open_before:
                self._selector.unregister(descriptor)
            if self._guardian:
                self._guardian.remove(worker.pid)
            if failure := worker.failure_of_exit(status, self._step(worker)):
                self.failures.append(failure)
            worker.close()

    def settle(self) -> None:
        """After a failure, wait a moment for the failures of other ranks: one of them may have come first."""
        if not self.failures:
            return
        began = time.monotonic()
        while not self.done:
            cause_known = any(not failure.lost_peer for failure in self.failures)
            if time.monotonic() > began + (_SETTLE if cause_known else _SETTLE_LOST):
                return
            self.listen(_SOON)

    def end(self) -> None:
        """End all workers and whatever they started, by force if need be, and let go of everything."""
        known = list(self.failures)
        for number, patience in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, _KILL)):
            for worker in self.workers:
                if not worker.ended:
                    kill_group(worker.pid, number)
            deadline = time.monotonic() + patience
            while not self.done and time.monotonic() < deadline:
                self.listen(_SOON)
        self.failures = known  # what failed since then failed because it was being ended
        if self._guardian:
            self._guardian.dismiss()
        for worker in self.workers:
            if not worker.ended:
                worker.close()
        self._selector.close()
        self._listener.close()
        self._store = None
        # The forking thread must not be the last to hold the workers' work: it ends at any time, even with the
        # interpreter, and what that work holds (tensors) cannot be let go of then.
        self._target = None
        self._over.set()

    def _step(self, worker: Worker) -> int | None:
        step = self._steps[worker.rank]
        return None if step == _NO_STEP else step

    def _fork_all(self) -> None:
        try:
            self._guardian = guardian = Guardian()
            for rank in range(self._world_size):
                self.workers.append(self._fork(rank, guardian))
        except BaseException as error:
            self._trouble = error
        self._forked.set()
        self._over.wait()

    def _fork(self, rank: int, guardian: Guardian) -> Worker:
        with ExitStack() as launchers, ExitStack() as workers:
            reading: list[int] = []
            writing: list[int] = []
            for _ in range(3):
                ours, theirs = os.pipe()
                launchers.callback(os.close, ours)
                workers.callback(os.close, theirs)
                os.set_blocking(ours, False)
                reading.append(ours)
                writing.append(theirs)
            crash = launchers.enter_context(tempfile.TemporaryFile())
            launcher = os.getpid()
            pid = fork()
            if pid == 0:
                guardian.forget()
                foreign = [*reading, *(ours for worker in self.workers for ours in worker.descriptors)]
                foreign.append(self._listener.detach())
                report, stdout, stderr = writing
                wires = Wires(
                    report=report, stdout=stdout, stderr=stderr, steps=self._steps, crash=crash, foreign=tuple(foreign)
                )
                assert self._target is not None
                live(self._target, self._place(rank), wires, launcher)
            guardian.add(pid)
            launchers.pop_all()  # from here on the worker object's
            return Worker(rank, pid, reading, crash)

    def _place(self, rank: int) -> Place:
        """Of a worker, in its own process."""
        size, meeting = self._world_size, f"tcp://{self._address}:{self._port}"
        host = self._hosts.enter(rank) if self._hosts else self._address
        return Place(rank=rank, world_size=size, local_rank=rank, store=meeting, local_world_size=size, host=host)
