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
from typing import Any, final

import torch.distributed as dist

from phalanx.comm import Place
from phalanx.comm.handshake import new_secret
from phalanx.errors import RunError
from phalanx.launch.addresses import LOOPBACK
from phalanx.launch.failure import Failure, first_failure, time_for_others
from phalanx.launch.hang_watch import WatchedRank
from phalanx.launch.launcher import Launch, WorkerFunction, Workers
from phalanx.launch.rank_probe import ProbeFiles
from phalanx.launch.reaper import ENDING, Reaper, fork, kill_group
from phalanx.launch.worker_process import WorkerPipes, WorkerProcess, run_worker

# seconds; together they stay well under the 3 s in which everything has to be over
_GRACE = 0.5  # between SIGTERM and SIGKILL
_GRACE_TRAINING = 0.05  # the same, where workers train
_KILL = 1.0  # after SIGKILL
_SOON = 0.002  # between looks at a worker that has reported and is about to end

_NO_STEP = -1


@final
class WorkerPool(Workers):
    """All workers of one launch.

    Attributes:
        workers: in rank order.
        failures: in the order they became known, up to the moment the launch began to end the workers.
    """

    def __init__(self, launch: Launch) -> None:
        world_size = launch.world_size
        self.workers: list[WorkerProcess] = []
        self.failures: list[Failure] = []
        self._function: WorkerFunction | None = launch.function
        self._threads = launch.threads
        self._world_size, self._timeout = world_size, launch.timeout
        self._run = launch.run
        self._steps = memoryview(mmap.mmap(-1, 8 * (world_size + 1))).cast("q")
        for rank in range(world_size):
            self._steps[rank] = _NO_STEP
        # bound before the fork, so that its port is known; served after it, so that no server thread is forked
        self._secret = new_secret()  # in memory alone: forked workers have it with everything else
        self._listener = socket.create_server((LOOPBACK, 0), backlog=max(128, 2 * world_size))
        self._port: int = self._listener.getsockname()[1]
        self._store: object = None
        self._reaper: Reaper | None = None
        self._selector = selectors.DefaultSelector()
        self._forked = threading.Event()
        self._ended = threading.Event()
        self._fork_error: BaseException | None = None

    @property
    def results(self) -> list[Any]:
        """What each worker returned, in rank order; meaningful once all have ended without a failure."""
        return [worker.result for worker in self.workers]

    @property
    def _done(self) -> bool:
        return all(worker.ended for worker in self.workers)

    def start(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()  # else what is buffered could be printed once more by each worker
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
            timeout=timedelta(seconds=self._timeout),
            master_listen_fd=self._listener.detach(),
        )

    def follow(self, timeout: float) -> bool:
        self._listen(timeout)
        if self.failures:
            self._await_other_failures()
        return not self._done and not self.failures

    def failure(self) -> Failure | None:
        return first_failure(self.failures) if self.failures else None

    def request_stop(self, number: int) -> bool:
        if self._run is None or all(step == _NO_STEP for step in self._steps[: self._world_size]):
            return False
        self._steps[-1] = number
        return True

    @property
    def stopped(self) -> int:
        told = (worker.result for worker in self.workers)
        return max((one["stopped"] for one in told if isinstance(one, dict) and "stopped" in one), default=0)

    def known_failures(self) -> list[Failure]:
        return self.failures

    def watched(self) -> dict[int, WatchedRank]:
        return {
            worker.rank: WatchedRank(worker.pid, self._step(worker), None if worker.ended else worker.files)
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
        open_before = tuple(worker.descriptors)
        status = worker.reap()
        if failure := worker.failure(self._step(worker)):
            self.failures.append(failure)
        if status is None:
            return
        for descriptor in open_before:
            self._selector.unregister(descriptor)
        if self._reaper:
            self._reaper.remove(worker.pid)
        failure = worker.failure_of_exit(status, self._step(worker))
        worker.close()
        if failure:
            self.failures.append(failure)

    def _await_other_failures(self) -> None:
        """One of them may have come first."""
        began = time.monotonic()
        while not self._done:
            late = time.monotonic() > began + time_for_others(self.failures)
            self._listen(_SOON)  # once more where it is late: this process may have been held meanwhile
            if late:
                return

    def stop(self) -> None:
        before = list(self.failures)
        self._steps[-1] = ENDING
        # Of a run that trains SIGTERM is a request, which a worker hears only between two calls of compiled code.
        grace = _GRACE if self._run is None else _GRACE_TRAINING
        for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, _KILL)):
            for worker in self.workers:
                if not worker.ended:
                    kill_group(worker.pid, number)
            deadline, late = time.monotonic() + patience, False
            while not late and not self._done:
                late = time.monotonic() > deadline
                self._listen(_SOON)  # as above
        self.failures = before  # what failed since then failed because it was being ended
        if self._reaper:
            self._reaper.dismiss()
        for worker in self.workers:
            if not worker.ended:
                worker.close()
        self._selector.close()
        self._listener.close()
        self._store = None
        # The forking thread must not be the last to hold the workers' work: it ends at any time, even with the
        # interpreter, and what that work holds (tensors) cannot be let go of then.
        self._function = None
        self._ended.set()

    def _step(self, worker: WorkerProcess) -> int | None:
        step = self._steps[worker.rank]
        return None if step == _NO_STEP else step

    def _fork_all(self) -> None:
        try:
            self._reaper = reaper = Reaper()
            for rank in range(self._world_size):
                self.workers.append(self._fork(rank, reaper))
        except BaseException as error:
            self._fork_error = error
        self._forked.set()
        self._ended.wait()

    def _fork(self, rank: int, reaper: Reaper) -> WorkerProcess:
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
            crash, stacks, standing = (launchers.enter_context(tempfile.TemporaryFile()) for _ in range(3))
            files = ProbeFiles(stacks.fileno(), standing.fileno())
            launcher, place = os.getpid(), self._place(rank)
            pid = fork()
            if pid == 0:
                reaper.forget()
                others = (ours for process in self.workers for ours in process.descriptors)
                foreign = (*reading, self._listener.detach(), *others)
                names = dict(zip(("report", "stdout", "stderr"), writing, strict=True))
                pipes = WorkerPipes(**names, steps=self._steps, crash=crash, files=files, foreign=foreign)
                assert self._function is not None
                run_worker(self._function, place, pipes, launcher, self._threads)
            reaper.add(pid)
            launchers.pop_all()  # from here on the worker object's
            return WorkerProcess(rank, pid, reading, (crash, stacks, standing))

    def _place(self, rank: int) -> Place:
        size, meeting = self._world_size, f"tcp://{LOOPBACK}:{self._port}"
        here = {"local_rank": rank, "local_world_size": size, "host": LOOPBACK}
        return Place(rank=rank, world_size=size, store=meeting, secret=self._secret, timeout=self._timeout, **here)
