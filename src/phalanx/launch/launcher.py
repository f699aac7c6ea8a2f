"""The interface between ``supervise`` and what starts the workers of a run: forks on this machine, or hosts by SSH."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from phalanx.comm import Place
from phalanx.config import RunSpec
from phalanx.config.run import TIMEOUT
from phalanx.errors import SpecError
from phalanx.launch.failure import Failure
from phalanx.launch.hang_watch import WatchedRank
from phalanx.launch.jobfile import load_job
from phalanx.train.findings import Findings

if TYPE_CHECKING:
    from phalanx.launch.targets import AttachedTarget


class StepReport(Protocol):
    """What a forked worker calls with the number of each optimizer step that it begins."""

    def __call__(self, step: int, /) -> None: ...

    def asked(self) -> int:
        """What the launcher asks for: the number of a signal by which to stop, 0 for nothing, ``ENDING``."""
        ...


WorkerFunction = Callable[[Place, StepReport], Any]
"""What a forked worker runs: given its place, and what it reports its steps to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What is to be started; the same for every launcher.

    Attributes:
        function: what each runs, for a launcher that forks them. Its result must be JSON.
        run: the same as a run file has it, for a launcher whose workers read one (``WorkerReports.write_run``).
            ``None`` where the function is no run.
        findings: of the look at the job, for workers that are not forked from this process.
        loadable: whether a process that is not forked from this one finds the job by ``run.job``.
        threads: that each worker computes with; its share of its machine's cores where not given.
        timeout: seconds that workers wait for each other.
        background: the process that starts them is beside the one that its user has, who asks it to stop by a call.
    """

    world_size: int
    function: WorkerFunction
    run: RunSpec | None = None
    findings: Findings | None = None
    loadable: bool = False
    threads: int | None = None
    timeout: float = TIMEOUT
    background: bool = False


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

    def request_stop(self, number: int) -> bool:
        """Have the run stop after the step that is under way, with a checkpoint, for the signal of that number.

        Returns:
            Whether that is asked for: not of workers that have begun no step, or that are no run's. They go on to be
            followed; those of a launcher that gives False here are ended at once.
        """
        return False

    @property
    def stopped(self) -> int:
        """The signal that the run has stopped for, with a checkpoint; 0 where it came to its end. After ``stop``."""
        return 0

    @abstractmethod
    def stop(self) -> None:
        """End all workers and what they started, by force if need be, within 3 s, and let go of everything.

        Called once for each launch, however it ended, and not cut short by signals. Afterwards no process, no
        descriptor and no file of the launch is left, in the run folder aside.
        """

    @abstractmethod
    def failure(self) -> Failure | None:
        """The first failure of a worker up to ``stop``; ``None`` where each did what it was to do.

        Called before ``stop``, too, once ``follow`` has said no. What failed because it was being ended does not count.
        """

    def known_failures(self) -> Sequence[Failure]:
        """Every failure that is known so far; may be left out by a launcher whose workers nobody watches."""
        return ()

    def watched(self) -> Mapping[int, WatchedRank]:
        """Rank → its process, of workers on this machine that write down where they stand (``rank_probe.py``).

        A launcher that leaves this out has no report of hangs.
        """
        return {}


class Launcher(ABC):
    """One way of starting workers on this machine. What it started is in the ``Workers`` it gives."""

    @abstractmethod
    def prepare(self, launch: Launch) -> None:
        """Refuse what cannot be started from here, and load what workers share with this process.

        Called before the run folder is made and before any process is started, and again before lost workers are
        started anew; leaves nothing that has to be undone but what ``release`` lets go of.

        Raises:
            SpecError: with everything in ``launch`` that this launcher cannot do.
            RunError: this process is in no state to start workers.
        """

    def release(self) -> None:  # noqa: B027  most have nothing to let go of
        """Let go of what ``prepare`` has opened and no ``start`` has taken; nothing for a launcher that opens nothing.

        Called once no more is started, also where the run was refused after ``prepare``.
        """

    @abstractmethod
    def start(self, launch: Launch) -> Workers:
        """Start the workers, and return at once. Called once after ``prepare``; signals wait until it returns.

        Raises:
            RunError: workers cannot be started; nothing of them is left.
        """


def find_launcher(name: str) -> Launcher | AttachedTarget:
    """Return the launcher called ``name``: ``local``, or of ``ssh:hosts.toml`` the target.

    Raises:
        SpecError: there is none of that name, or the file is wrong.
    """
    if name == "local":
        from phalanx.launch.local import LocalLauncher

        return LocalLauncher()
    if ":" in name:
        from phalanx.launch.targets import AttachedTarget, find_target

        if isinstance(target := find_target(name), AttachedTarget):
            return target
    raise SpecError.of(where="launcher", given=repr(name), allowed="local, ssh:hosts.toml", fix='launcher="local"')


def refuse_copies() -> None:
    """Refuse to start a run in one of several tasks that srun or mpirun has started: each would train by itself.

    Raises:
        SpecError: this process is such a task.
    """
    for variable, counts in _TASKS.items():
        of = next((int(os.environ[name]) for name in counts if os.environ.get(name, "").isdecimal()), 1)
        # a batch script of Slurm has the number, too, and no step
        if of > 1 and {variable, *(["SLURM_STEP_ID"] if variable == "SLURM_PROCID" else [])} <= os.environ.keys():
            raise SpecError.of(
                "launcher",
                f"task {os.environ[variable]} of {of} ({variable}), each of which would train the whole run",
                "one process, which starts its workers itself",
                f"srun -n 1 or mpirun -n 1, or phalanx launch; where each is a run of its own: env -u {variable}",
            )


_TASKS = {
    "SLURM_PROCID": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    "OMPI_COMM_WORLD_RANK": ("OMPI_COMM_WORLD_SIZE",),
    "PMI_RANK": ("PMI_SIZE",),
}


def refuse_what_needs_a_fork(launch: Launch, launcher: str) -> None:
    """For the ``prepare`` of a launcher, called ``launcher``, whose workers are programs of their own.

    Raises:
        SpecError: a job that only this process has, or none where the run says it is.
    """
    if not launch.loadable:
        given = f"{launcher}, for a job that only this process has"
        allowed = "a job that new processes can load: run= with the file or module it is in"
        run = 'run=px.RunSpec(job="train.py:job", plan=plan, folder=folder)'
        fix = f'px.fit(job(), {run}, launcher="{launcher}")'
        raise SpecError.of("launcher", given, allowed, fix)
    if launch.run:
        load_job(launch.run.job)
