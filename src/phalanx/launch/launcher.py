"""What a launcher offers, the table of those there are, and the loop that sees a launch through to its end.

A launcher is one way of starting the workers of a run. ``find_launcher`` gives the one that was asked for; its
``prepare`` refuses what it cannot do before anything is written, its ``start`` gives the ``Workers`` that ``supervise``
follows and stops. A new one is a file with these two classes and a line in ``LAUNCHERS``.
"""

from __future__ import annotations

import difflib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, TypeVar

from phalanx.comm import Place
from phalanx.config import RunSpec
from phalanx.errors import Problem, SpecError
from phalanx.launch.failure import Failure, memory_kills, refusal, worker_error
from phalanx.launch.jobfile import load_job
from phalanx.launch.reaper import Interrupts

# A text each, so that what one launcher needs is imported only where that one is asked for.
LAUNCHERS = {"local": "phalanx.launch.local:LocalLauncher", "torchrun": "phalanx.launch.torchrun:TorchrunLauncher"}
"""Every launcher: what users call it, and its class."""

WorkerFunction = Callable[[Place, Callable[[int], None]], Any]
"""What a forked worker runs: given its place, and what takes the number of each optimizer step that it begins."""

_TICK = 0.05  # seconds that workers are followed for at a time
_WATCH = 0.1  # seconds between calls of watch


class WorkerHosts(Protocol):
    """Machines, or what stands in for them, that forked workers are put on; the launcher stays where it is."""

    @property
    def meeting(self) -> str:
        """The launcher's address, which every worker reaches."""
        ...

    def enter(self, rank: int) -> str:
        """Called by the worker ``rank`` as the first thing it does: puts it on its machine. Returns its address."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What is to be started; the same for every launcher.

    Attributes:
        function: what each runs, for a launcher that forks them. Its result must be JSON.
        run: the same as a run file has it, for a launcher whose workers read ``run.toml`` in the run's folder, which is
            there when it starts. ``None`` where the function is no run.
        loadable: whether a process that is not forked from this one finds the job by ``run.job``.
        threads: that each worker computes with; its share of its machine's cores where not given.
        hosts: where workers are put; all on this machine's own network where not given.
        reserves: how many killed workers may be replaced by a process that begins anew, with the same rank; a launcher
            that cannot replace one ends the run at the first.
    """

    world_size: int
    function: WorkerFunction
    run: RunSpec | None = None
    loadable: bool = False
    threads: int | None = None
    hosts: WorkerHosts | None = None
    reserves: int = 0


class Workers(ABC):
    """The workers of one launch. ``supervise`` is the one caller: follow until it says no, stop, then failure."""

    @abstractmethod
    def follow(self, timeout: float) -> bool:
        """Take in for at most ``timeout`` seconds what workers do; what they print goes on to this process's streams.

        Returns:
            Whether there is more to come: False once all have ended, or one has failed and so has every other that
            failed at the same time, as far as a second or so tells.

        Raises:
            RunError: what starts and watches the workers failed, rather than a worker.
        """

    @abstractmethod
    def stop(self) -> None:
        """End all workers and what they started, by force if need be, within 3 s, and let go of everything.

        Called once for each launch, however it ended, and not cut short by signals. Afterwards no process, no
        descriptor and no file of the launch is left, in the run folder aside.
        """

    @abstractmethod
    def failure(self) -> Failure | None:
        """The first failure of a worker up to ``stop``; ``None`` where each did what it was to do.

        Called after ``stop``; what failed because it was being ended does not count.
        """


class Launcher(ABC):
    """One way of starting workers. It has no state: what it started is in the ``Workers`` it gives."""

    @abstractmethod
    def place(self) -> Place | None:
        """This process's place, if it is a worker that this launcher started and that has to find that out by itself.

        Called first of all by ``fit``, ``build`` and ``phalanx worker``. The environment is read here only.

        Raises:
            SpecError: part of what says so is missing or wrong.
        """

    @abstractmethod
    def prepare(self, launch: Launch) -> None:
        """Refuse what cannot be started from here, and load what workers share with this process.

        Called before the run folder is made and before any process is started; leaves nothing that has to be undone.

        Raises:
            SpecError: with everything in ``launch`` that this launcher cannot do.
            RunError: this process is in no state to start workers.
        """

    @abstractmethod
    def start(self, launch: Launch) -> Workers:
        """Start the workers, and return at once. Called once after ``prepare``; signals wait until it returns.

        Raises:
            RunError: workers cannot be started; nothing of them is left.
        """


def find_launcher(name: str) -> Launcher:
    """The launcher of that name.

    Raises:
        SpecError: there is none; it lists those there are.
    """
    if name not in LAUNCHERS:
        near = difflib.get_close_matches(name, LAUNCHERS, n=1, cutoff=0.4)
        fix = f"--launcher {near[0] if near else 'local'}"
        raise SpecError.of(where="launcher", given=repr(name), allowed=", ".join(LAUNCHERS), fix=fix)
    module, _, kind = LAUNCHERS[name].partition(":")
    return getattr(import_module(module), kind)()


def place_of_this_process() -> Place | None:
    """This process's place where a launcher started it as a worker, ``None`` where it is none.

    Raises:
        SpecError: a launcher seems to have started it, and part of what it says is missing or wrong.
    """
    places = (find_launcher(name).place() for name in LAUNCHERS)
    return next((place for place in places if place is not None), None)


def refuse_what_needs_a_fork(launch: Launch, launcher: str) -> None:
    """For the ``prepare`` of a launcher, called ``launcher``, whose workers are programs of their own.

    Raises:
        SpecError: there are hosts, or a job that only this process has, or none where the run says it is.
    """
    problems: list[Problem] = []
    if launch.hosts:
        given = f"hosts, with the launcher {launcher}"
        allowed = "only with the launcher local, which moves workers onto them"
        problems.append(Problem(where="hosts", given=given, allowed=allowed, fix='launcher="local"'))
    if not launch.loadable:
        given = f"{launcher}, for a job that only this process has"
        allowed = "a job that new processes can load: run= with the file or module it is in"
        run = 'run=px.RunSpec(job="train.py:job", plan=plan, folder=folder)'
        fix = f'px.fit(job(), {run}, launcher="{launcher}")'
        problems.append(Problem(where="launcher", given=given, allowed=allowed, fix=fix))
    if problems:
        raise SpecError(problems)
    if launch.run:
        load_job(launch.run.job)


_Started = TypeVar("_Started", bound=Workers)


def supervise(start: Callable[[], _Started], world_size: int, watch: Callable[[], None] | None = None) -> _Started:
    """Start workers, follow them to their end, and stop whatever is left of them.

    The first failure ends all workers within 3 s. So do Ctrl-C and SIGTERM, which then go on as ``KeyboardInterrupt``
    and ``SystemExit``. ``watch`` is called in this process about ten times a second, and once more when all are done.

    Returns:
        The workers, all of which did what they were to do and are gone.

    Raises:
        SpecError: a worker refused the job or the plan; it comes as what the worker raised.
        WorkerError: a worker failed; the first that did is named, with its own traceback.
        RunError: workers could not be started or watched.
    """
    kills_before = memory_kills()
    with Interrupts() as interrupts:
        interrupts.held = True
        workers = start()
        try:
            interrupts.held = False
            next_watch, more = 0.0, True
            while more:
                more = workers.follow(_TICK)
                interrupts.check()
                if watch and time.monotonic() >= next_watch:
                    watch()
                    next_watch = time.monotonic() + _WATCH
        finally:
            interrupts.held = True
            workers.stop()
            interrupts.held = False
        if failure := workers.failure():
            raise refusal(failure) or worker_error(failure, world_size, memory_kills=memory_kills() - kills_before)
        if watch:
            watch()
        return workers
