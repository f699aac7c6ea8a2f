"""Workers that torchrun starts, called by hand on any hosts or by ``TorchrunLauncher`` on this one.

The one place where torchrun's environment variables are read.

``torchrun --nproc-per-node 2 --no-python phalanx worker RUN/run.toml`` runs what ``phalanx train`` runs, on any hosts
that torchrun reaches. ``phalanx train --launcher torchrun`` has this file start torchrun on this machine.

Between this process and the workers stands torchrun's own, here called the agent: it starts the workers, ends all when
one fails, and knows how each ended. The kernel ends it with this process, and the workers with it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import final

from phalanx.comm import Place
from phalanx.errors import Problem, RunError, SpecError
from phalanx.launch.failure import Failure, WorkerReports, failure_of_exit, first_failure
from phalanx.launch.launcher import Launch, Launcher, Workers, refuse_what_needs_a_fork
from phalanx.launch.reaper import is_running, kill_group
from phalanx.launch.worker_pool import WorkerPool
from phalanx.launch.worker_process import threads_each

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_NAMES = (*_NUMBERS, "MASTER_ADDR", "MASTER_PORT")

# seconds; with those of the worker pool they stay under the 3 s in which everything has to be over
_SAME_TIME = 0.3  # after a failure, for reports of workers that failed at the same time
_SAME_TIME_LOST = 1.0  # the same, while all that is known is that peers were lost
_KILL = 0.5  # after SIGKILL
_SOON = 0.02  # between looks at what is about to end


@final
class TorchrunLauncher(Launcher):
    """Has torchrun start ``phalanx worker`` once for each rank, on this machine."""

    def place(self) -> Place | None:
        return place_from_environment()

    def prepare(self, launch: Launch) -> None:
        """Refuse what a new process could not load, or torchrun could not put somewhere."""
        refuse_what_needs_a_fork(launch, "torchrun")

    def start(self, launch: Launch) -> TorchrunWorkers:
        assert launch.run is not None  # refused before
        workers = TorchrunWorkers(launch, launch.run.folder.absolute() / "run.toml")
        workers.start()
        return workers


@final
class TorchrunWorkers(Workers):
    """The agent, forked like a local worker, and what the workers it started left in the reports' folder."""

    def __init__(self, launch: Launch, runfile: Path) -> None:
        self._failures: list[Failure] = []
        self._folder = tempfile.TemporaryDirectory(prefix="phalanx-torchrun-", ignore_cleanup_errors=True)
        self._reports = WorkerReports(Path(self._folder.name))
        threads = str(launch.threads or os.environ.get("OMP_NUM_THREADS") or threads_each(launch.world_size))
        worker = ["-m", "phalanx", "worker", str(runfile), "--reports", self._folder.name]

        def agent(place: Place, report: Callable[[int], None]) -> dict[int, int]:
            os.environ["OMP_NUM_THREADS"] = threads
            return _run_agent(launch.world_size, [sys.executable, *worker], self._folder.name)

        self._agent = WorkerPool(Launch(world_size=1, function=agent))

    def start(self) -> None:
        try:
            self._agent.start()
        except BaseException:
            self.stop()
            raise

    def follow(self, timeout: float) -> bool:
        """Pass on what is printed, for at most ``timeout`` seconds; a worker's failure or the agent's end ends it."""
        more = self._agent.follow(timeout)
        if more and not self._reports.failures():
            return True
        began = time.monotonic()
        while more:
            lost = all(failure.lost_peer for failure in self._reports.failures())
            if time.monotonic() > began + (_SAME_TIME_LOST if lost else _SAME_TIME):
                break
            more = self._agent.follow(_SOON)
        self._failures = [*self._reports.failures(), *self._unreported()]
        if not self._failures and (trouble := self._agent.failure()):
            raise RunError(f"torchrun failed: {trouble.kind}: {trouble.message}\n    try: --launcher local")
        return False

    def stop(self) -> None:
        """Have the agent end the workers; end it and them by force where that takes long."""
        self._agent.stop()
        if self._agent.results == [None]:  # else the agent saw every worker's end, and numbers may be someone else's
            for pid in self._reports.processes():
                kill_group(pid, signal.SIGKILL)
            deadline = time.monotonic() + _KILL
            while any(map(is_running, self._reports.processes())) and time.monotonic() < deadline:
                time.sleep(_SOON)
        self._folder.cleanup()

    def failure(self) -> Failure | None:
        return first_failure(self._failures) if self._failures else None

    def _unreported(self) -> list[Failure]:
        reported = {failure.rank for failure in self._reports.failures()}
        exit_codes: dict[str, int] = self._agent.results[0] or {}
        return [
            failure_of_exit(int(rank), self._reports.step(int(rank)), code)
            for rank, code in exit_codes.items()
            if int(rank) not in reported
        ]


def _run_agent(world_size: int, worker: list[str], folder: str) -> dict[int, int]:
    """Be torchrun's own process, with its files in ``folder``.

    Returns:
        The exit code of each rank that failed, negative for a signal.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    for name in ("multiprocessing.api", "agent.server.api"):  # what they warn of, the launcher says
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    options = ["--nproc-per-node", str(world_size), "--standalone", "--log-dir", folder, "--no-python"]
    try:
        run(parse_args([*options, *worker]))
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    except SignalException as error:
        os._exit(128 + int(error.sigval))
    return {}


def place_from_environment() -> Place | None:
    """This process's place among those of torchrun, or ``None`` where torchrun did not start it.

    Raises:
        SpecError: some of torchrun's variables are there and others are missing or no numbers.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return None
    problems = [
        Problem(
            where=f"environment variable {name}",
            given=repr(os.environ[name]) if name in os.environ else "nothing",
            allowed="what torchrun sets: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT together",
            fix="torchrun --nproc-per-node 2 --no-python phalanx worker RUN/run.toml",
        )
        for name in _NAMES
        if name not in os.environ or (name in (*_NUMBERS, "MASTER_PORT") and not os.environ[name].isdecimal())
    ]
    if problems:
        raise SpecError(problems)
    rank, world_size, local_rank = (int(os.environ[name]) for name in _NUMBERS)
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    beside = int(here) if here.isdecimal() else 0
    return Place(rank=rank, world_size=world_size, local_rank=local_rank, store="env://", local_world_size=beside)


def claim(key: str, *, patience: timedelta = timedelta(seconds=2)) -> bool:
    """Whether this worker is the first of all to ask for ``key``; also true where that cannot be found out.

    It asks torchrun's own store, which outlives the workers, so that it works while they are failing.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    try:
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=patience)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return store.add(f"phalanx/{attempt}/{key}", 1) == 1
    except RuntimeError:
        return True
