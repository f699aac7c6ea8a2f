"""All workers of one launch on this machine, seen from the launcher: forked, followed, ended.

``torch.distributed.elastic`` does not start them (2026-11-29, torch 2.13, 2 cores, 20 launches of 2 ranks each): its
``start_processes`` named the first failing rank in 2 launches of 20 after an exception and 8 of 20 after ``kill -9``,
and waited without limit for a worker that takes SIGTERM for a request to save.

Two things make it safe to fork a process that has imported torch:

* **OpenMP.** GNU OpenMP keeps a pool of threads for each thread that entered a parallel region. A process forked from
  such a thread hangs in its first parallel region on 2 threads (torch 2.13). So workers are forked from a fresh thread
  that never computes. Python makes it the child's main thread; it is started by ``_thread`` because only then is it a
  real ``_MainThread`` there, without which torch's DataLoader does not watch its processes.
* **CUDA** does not survive a fork at all; ``local.py`` refuses a launcher that already uses it.

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
from typing import IO, Any, final

import torch.distributed as dist

from phalanx.comm import Place
from phalanx.comm.handshake import new_secret
from phalanx.errors import RunError
from phalanx.launch.addresses import LOOPBACK
from phalanx.launch.failure import Failure, failure_of_exit, first_failure, time_for_others
from phalanx.launch.hangs import WatchedRank
from phalanx.launch.reaper import Reaper, fork, kill_group
from phalanx.launch.worker_process import Launch, OutputRelay, WorkerFunction, WorkerPipes, run_worker

_KILL = 1.0  # seconds after SIGKILL
_SOON = 0.002  # seconds between looks at a worker that has reported and is about to end
_CHUNK = 65536
_NO_STEP = -1


@final
class WorkerProcess:
    """The launcher's handle to one worker.

    Attributes:
        result: the worker's result; meaningful once it has ended without a failure.
        ended: the process is gone and all of its output has been read.
        descriptors: the launcher's ends of its pipes that are still open.
        stacks: file that the worker writes its stacks into, and the traceback of a crash.
    """

    def __init__(self, rank: int, pid: int, pipes: list[int], stacks: IO[bytes]) -> None:
        self.rank, self.pid, self.result = rank, pid, None
        self.ended = self.failed = False
        self.descriptors = set(pipes)
        self._report_pipe, stdout, self._stderr = pipes
        self._relays = {stdout: OutputRelay(rank, "stdout"), self._stderr: OutputRelay(rank, "stderr")}
        self._file, self.stacks = stacks, stacks.fileno()
        self._report, self._errors = bytearray(), b""

    @property
    def reported(self) -> bool:
        return self._report.endswith(b"\n")

    def read(self, descriptor: int) -> bool:
        """Read from a pipe; close it at its end. Return True if there was anything."""
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
                self._errors = (self._errors + data)[-_CHUNK:]
        return bool(data)

    def failure(self, step: int | None) -> Failure | None:
        """Return the failure that the worker has reported, once."""
        if self.failed or not self.reported:
            return None
        report = json.loads(self._report)
        self.failed = "error" in report
        if self.failed:
            return Failure(rank=self.rank, step=step, **report["error"])
        self.result = report["result"]
        return None

    def reap(self) -> int | None:
        """Return the exit status once the process has ended, and end the processes that it had started."""
        try:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            kill_group(self.pid, signal.SIGKILL)  # while its number cannot yet be someone else's
            _, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:  # the application around us does not keep exit statuses
            status = 0
        for descriptor in tuple(self.descriptors):
            for _ in range(64):  # more than a pipe holds; no end is promised if a stranger still writes
                if not self.read(descriptor):
                    break
        self.ended = True
        return status

    def failure_of_exit(self, status: int, step: int | None) -> Failure | None:
        """Return the failure that only the exit status shows."""
        if self.failed or (self.reported and status == 0):
            return None
        self.failed = True
        self._file.seek(0)
        written, errors = (text.decode(errors="replace") for text in (self._file.read(), self._errors))
        _, crash, traceback = written.partition("Fatal Python error")
        return failure_of_exit(self.rank, step, os.waitstatus_to_exitcode(status), crash + traceback, errors)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()
        for relay in self._relays.values():
            relay.close()
        self._file.close()


@final
class WorkerPool:
    """All workers of one launch. ``supervise`` calls: start, follow until it returns False, stop, failure.

    Attributes:
        workers: in rank order.
        failures: in the order they became known, until the launcher began to end the workers.
    """

    def __init__(self, launch: Launch) -> None:
        self.workers: list[WorkerProcess] = []
        self.failures: list[Failure] = []
        self._function: WorkerFunction | None = launch.function
        self._launch, self._world_size = launch, launch.world_size
        self._steps = memoryview(mmap.mmap(-1, 8 * (self._world_size + 1))).cast("q")
        for rank in range(self._world_size):
            self._steps[rank] = _NO_STEP
        # bound before the fork, so that its port is known; served after it, so that no server thread is forked
        self._secret = new_secret()  # in memory alone: forked workers have it with everything else
        self._listener = socket.create_server((LOOPBACK, 0), backlog=max(128, 2 * self._world_size))
        self._port: int = self._listener.getsockname()[1]
        self._store: object = None
        self._reaper: Reaper | None = None
        self._selector = selectors.DefaultSelector()
        self._forked, self._ended = threading.Event(), threading.Event()
        self._fork_error: BaseException | None = None

    @property
    def results(self) -> list[Any]:
        """The result of each worker, in rank order; meaningful once all have ended without a failure."""
        return [worker.result for worker in self.workers]

    @property
    def _done(self) -> bool:
        return all(worker.ended for worker in self.workers)

    def start(self) -> None:
        """Fork all workers.

        Raises:
            RunError: there are too many processes or open files.
        """
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()  # else buffered text could be printed once more by each worker
        _thread.start_new_thread(self._fork_all, ())
        self._forked.wait()
        for worker in self.workers:
            for descriptor in worker.descriptors:
                self._selector.register(descriptor, selectors.EVENT_READ, worker)
        if self._fork_error:
            raise RunError(
                f"could not start worker {len(self.workers)} of {self._world_size}: {self._fork_error}\n    try: "
                "fewer ranks, such as -n 1; or a higher limit of processes (ulimit -u) or open files (ulimit -n)"
            ) from self._fork_error
        self._store = dist.TCPStore(
            LOOPBACK,
            self._port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=self._launch.timeout),
            master_listen_fd=self._listener.detach(),
        )

    def follow(self, timeout: float) -> bool:
        """Print the workers' output and note failures, for at most ``timeout`` seconds.

        Return False once all have ended, or one has failed and the others have had time to report.
        """
        self._listen(timeout)
        if self.failures:
            self._await_other_failures()
        return not self._done and not self.failures

    def failure(self) -> Failure | None:
        """Return the first failure of a worker before ``stop``."""
        return first_failure(self.failures) if self.failures else None

    def request_stop(self, number: int) -> bool:
        """Ask the run to save after the present step and stop, for the signal of that number.

        Return False if no step has begun, or the workers are no run's.
        """
        if self._launch.run is None or all(step == _NO_STEP for step in self._steps[: self._world_size]):
            return False
        self._steps[-1] = number
        return True

    @property
    def stopped(self) -> int:
        """The signal that the run has stopped for, with a checkpoint; 0 if it came to its end."""
        results = (worker.result for worker in self.workers)
        return max((one["stopped"] for one in results if isinstance(one, dict) and "stopped" in one), default=0)

    def watched(self) -> dict[int, WatchedRank]:
        """Return the process and the step of each rank."""
        return {
            worker.rank: WatchedRank(worker.pid, self._step(worker), None if worker.ended else worker.stacks)
            for worker in self.workers
        }

    def _listen(self, timeout: float) -> None:
        if any(worker.reported and not worker.ended for worker in self.workers):
            timeout = min(timeout, _SOON)
        for key, _ in self._selector.select(timeout):
            worker: WorkerProcess = key.data
            worker.read(key.fd)
            if key.fd not in worker.descriptors:
                self._selector.unregister(key.fd)
        for worker in self.workers:
            if not worker.ended:
                self._check(worker)

    def _check(self, worker: WorkerProcess) -> None:
        open_before, step = tuple(worker.descriptors), self._step(worker)
        status = worker.reap()
        failure = worker.failure(step)
        if status is not None:
            for descriptor in open_before:
                self._selector.unregister(descriptor)
            failure = failure or worker.failure_of_exit(status, step)
            worker.close()
        if failure:
            self.failures.append(failure)

    def _await_other_failures(self) -> None:
        """Wait for failures of other workers, one of which may have come first."""
        began = time.monotonic()
        while not self._done:
            late = time.monotonic() > began + time_for_others(self.failures)
            self._listen(_SOON)  # once more if it is late: this process may have been held meanwhile
            if late:
                return

    def stop(self) -> None:
        """End all workers and the processes that they started; close every descriptor. Call it once."""
        before = list(self.failures)
        for worker in self.workers:
            if not worker.ended:
                kill_group(worker.pid, signal.SIGKILL)
        deadline, late = time.monotonic() + _KILL, False
        while not late and not self._done:
            late = time.monotonic() > deadline
            self._listen(_SOON)  # as above
        self.failures = before  # later failures are those of workers that were being ended
        if self._reaper:
            self._reaper.dismiss()
        for worker in self.workers:
            if not worker.ended:
                worker.close()
        self._selector.close()
        self._listener.close()
        self._store = None
        # The forking thread must not be the last to hold the workers' function: it ends at any time, even with the
        # interpreter, when the tensors that the function holds cannot be freed any more.
        self._function = None
        self._ended.set()

    def _step(self, worker: WorkerProcess) -> int | None:
        step = self._steps[worker.rank]
        return None if step == _NO_STEP else step

    def _fork_all(self) -> None:
        try:
            for rank in range(self._world_size):
                self.workers.append(self._fork(rank))
            self._reaper = Reaper([worker.pid for worker in self.workers])
        except BaseException as error:
            self._fork_error = error
        self._forked.set()
        self._ended.wait()

    def _fork(self, rank: int) -> WorkerProcess:
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
            stacks = launchers.enter_context(tempfile.TemporaryFile())
            launcher, place = os.getpid(), self._place(rank)
            pid = fork()
            if pid == 0:
                others = (ours for process in self.workers for ours in process.descriptors)
                pipes = WorkerPipes(
                    **dict(zip(("report", "stdout", "stderr"), writing, strict=True)),
                    steps=self._steps,
                    stacks=stacks.fileno(),
                    foreign=(*reading, self._listener.detach(), *others),
                )
                assert self._function is not None
                run_worker(self._function, place, pipes, launcher, self._launch.threads)
            launchers.pop_all()  # from here on the worker object's
            return WorkerProcess(rank, pid, reading, stacks)

    def _place(self, rank: int) -> Place:
        return Place(
            rank=rank,
            world_size=self._world_size,
            local_rank=rank,
            local_world_size=self._world_size,
            store=f"tcp://{LOOPBACK}:{self._port}",
            host=LOOPBACK,
            secret=self._secret,
            timeout=self._launch.timeout,
        )
