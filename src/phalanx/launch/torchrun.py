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
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, final

from phalanx.comm import Place
from phalanx.comm.roll_call import answers, word_of
from phalanx.config import RunSpec
from phalanx.device_kinds import kind_for
from phalanx.errors import Problem, RunError, SpecError
from phalanx.files.single_writer import is_running
from phalanx.launch.addresses import LOOPBACK, connect_late, listen_at, own_address
from phalanx.launch.failure import Failure, WorkerReports, failure_of_exit, first_failure, gave_up, time_for_others
from phalanx.launch.hang_report import RankStand
from phalanx.launch.hang_watch import WatchedRank
from phalanx.launch.launcher import Launch, Launcher, Workers, refuse_what_needs_a_fork
from phalanx.launch.rank_probe import PROBE_FILES, ProbeFiles
from phalanx.launch.reaper import kill_group
from phalanx.launch.worker_pool import WorkerPool
from phalanx.launch.worker_process import threads_each

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyrefly: ignore

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_NAMES = (*_NUMBERS, "MASTER_ADDR", "MASTER_PORT")

# seconds; with those of the worker pool they stay under the 3 s in which everything has to be over
_AGENT_ENDS = 5.0  # after a worker whose peer was lost, which has ended: the agent knows how
_KILL = 0.5  # after SIGKILL
_SOON = 0.02  # between looks at what is about to end
_PATIENCE = timedelta(seconds=2)  # for torchrun's store


@final
class TorchrunLauncher(Launcher):
    """Has torchrun start ``phalanx worker`` once for each rank, on this machine."""

    def place(self) -> Place | None:
        place = place_from_environment()
        if place:
            listen_at(place.host)
            connect_late(place.world_size)
        return place

    def prepare(self, launch: Launch) -> None:
        """Refuse what a new process could not load, or torchrun could not put somewhere."""
        refuse_what_needs_a_fork(launch, "torchrun")

    def start(self, launch: Launch) -> TorchrunWorkers:
        assert launch.run is not None  # refused before
        try:
            workers = TorchrunWorkers(launch, launch.run)
        except OSError as error:
            what = f"a temporary folder for torchrun's workers cannot be written: {error.strerror}"
            raise RunError(f"{what}\n    try: free space there, or TMPDIR=/another/disk") from None
        workers.start()
        return workers


@final
class TorchrunWorkers(Workers):
    """The agent, forked like a local worker, and what the workers it started left in the reports' folder."""

    def __init__(self, launch: Launch, run: RunSpec) -> None:
        self._failures: list[Failure] = []
        self._world_size, self._stopped = launch.world_size, 0
        self._folder = tempfile.TemporaryDirectory(prefix="phalanx-torchrun-", ignore_cleanup_errors=True)
        self._reports = WorkerReports(Path(self._folder.name))
        self._probes: dict[int, ProbeFiles] = {}
        self._opened = ExitStack()
        runfile = self._reports.write_run(run, launch.findings)
        threads = str(launch.threads or os.environ.get("OMP_NUM_THREADS") or threads_each(launch.world_size))
        worker = ["-m", "phalanx", "worker", str(runfile), "--reports", self._folder.name]

        def agent(place: Place, report: Callable[[int], None]) -> dict[int, int]:
            os.environ["OMP_NUM_THREADS"] = threads
            kind_for(run.plan.device, run.plan.devices).before_workers(1, launch.world_size)
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
            known = self._reports.failures()
            broken = all(failure.lost_peer and not gave_up(failure) for failure in known)
            late = time.monotonic() > began + (_AGENT_ENDS if broken else time_for_others(known))
            more = self._agent.follow(_SOON)
            if late:
                break
        self._failures = [*self._reports.failures(), *self._unreported()]
        if not self._failures and (trouble := self._agent.failure()):
            raise RunError(f'torchrun failed: {trouble.kind}: {trouble.message}\n    try: launcher="local"')
        return False

    def request_stop(self, number: int) -> bool:
        """By a signal to the workers; the agent would end them by force after a while of its own."""
        running = self._reports.processes()
        if not running or all(self._reports.step(rank) is None for rank in range(self._world_size)):
            return False
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return True

    @property
    def stopped(self) -> int:
        return self._stopped

    def stop(self) -> None:
        """Have the agent end the workers; end it and them by force where that takes long."""
        self._agent.stop()
        self._stopped = self._reports.stopped()
        if self._agent.results == [None]:  # else the agent saw every worker's end, and numbers may be someone else's
            for pid in self._reports.processes():
                kill_group(pid, signal.SIGKILL)
            deadline = time.monotonic() + _KILL
            while any(map(is_running, self._reports.processes())) and time.monotonic() < deadline:
                time.sleep(_SOON)
        self._opened.close()
        self._folder.cleanup()

    def failure(self) -> Failure | None:
        return first_failure(self._failures) if self._failures else None

    def known_failures(self) -> list[Failure]:
        return self._failures

    def watched(self) -> dict[int, WatchedRank]:
        found: dict[int, WatchedRank] = {}
        for rank in range(self._world_size):
            if pid := self._reports.process(rank):
                files = self._files_of(rank) if is_running(pid) else None
                found[rank] = WatchedRank(pid, self._reports.step(rank), files)
        return found

    def _files_of(self, rank: int) -> ProbeFiles | None:
        if rank not in self._probes:
            with suppress(FileNotFoundError), ExitStack() as opened:
                paths = (self._reports.probe_file(rank, name) for name in PROBE_FILES)
                stacks, standing = (opened.enter_context(path.open("rb")) for path in paths)
                self._probes[rank] = ProbeFiles(stacks.fileno(), standing.fileno())
                self._opened.push(opened.pop_all())
        return self._probes.get(rank)

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

    from phalanx.launch.one_host import BACKEND, offer

    offer()
    for name in ("multiprocessing.api", "agent.server.api"):  # what they warn of, the launcher says
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    options = ["--nproc-per-node", str(world_size), "--log-dir", folder, "--no-python"]
    options += [
        "--rdzv-backend",
        BACKEND,
        "--rdzv-endpoint",
        LOOPBACK,
        "--rdzv-id",
        "phalanx",
        "--local-addr",
        LOOPBACK,
    ]
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
    master = os.environ["MASTER_ADDR"]
    one_host = beside == world_size or master == "localhost" or master.startswith("127.")
    return Place(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=beside,
        store="env://",
        host=own_address(master, one_host=one_host),
        meeting=f"{master}:{os.environ['MASTER_PORT']}",
        agent=agent_serves(),
        torchrun=started_by_agent(),
    )


AGENT = "PHALANX_AGENT"
"""The variable with the process number of the agent on this node, where a launch has started it."""


def started_by_agent() -> bool:
    """Whether torchrun's agent is this process's parent, or what stands between them ends with it."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def begun_before(number: int) -> bool:
    """Whether the agents that started this worker have started others before it that came to the run ``number``.

    That is so after a failure, and when hosts have come or gone. To be asked by rank 0.
    """
    store = _agent_store()
    if store is None:
        return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return store.check([f"phalanx/begun/{number}"])


def note_begun(number: int) -> None:
    """Let workers that are started instead of this one know that the run ``number`` of this process has its folder."""
    if store := _agent_store():
        store.set(f"phalanx/begun/{number}", "1")


def agent_serves() -> bool:
    """Whether torchrun's own store, which outlives workers, is the one that they meet at."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def claim(place: Place, key: str) -> bool:
    """Whether this worker is the first of its start to ask for ``key``; also true where that cannot be found out.

    It asks torchrun's own store, which outlives the workers, so that it works while they are failing.
    """
    store = _agent_store()
    try:
        return store is None or store.add(f"phalanx/{_start_of(place)}/{key}", 1) == 1
    except RuntimeError:
        return True


def _start_of(place: Place) -> str:
    """What tells this start of all workers from others; before they have met, how often this host's agent counts."""
    return word_of(place.meeting, place.rank) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _agent_store() -> TCPStore | None:
    if not agent_serves():
        return None
    try:
        return _own_connection()
    except RuntimeError:
        return None


def _own_connection() -> TCPStore:
    """To the store that workers meet at, of this thread alone, which soon gives up."""
    from torch.distributed import TCPStore  # pyrefly: ignore

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, is_master=False, timeout=_PATIENCE)


@final
class SharedStands:
    """Where workers on any hosts tell each other where they stand: at the store that they meet at.

    One of a thread: a store's client serves one call at a time.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._store: TCPStore | None = None

    def publish(self, stand: RankStand) -> None:
        """Tell where this rank stands."""
        with suppress(RuntimeError):
            if self._store or answers(self._place.meeting):
                self._store = self._store or _own_connection()
                self._store.set(self._key(self._place.rank), stand.to_json())

    def read(self) -> list[RankStand]:
        """Where each rank stands; of one that has not told only its number."""
        found: list[RankStand] = []
        with suppress(RuntimeError):
            store = self._store = self._store or _own_connection()
            for rank in range(self._place.world_size):
                told = store.get(self._key(rank)) if store.check([self._key(rank)]) else b""
                found.append(RankStand.from_json(told) if told else RankStand(rank=rank))
        return found

    def _key(self, rank: int) -> str:
        return f"phalanx/{_start_of(self._place)}/stands/{self._place.number}/{rank}"
