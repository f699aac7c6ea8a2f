"""Workers on this machine, forked from a process that has already imported torch, and the loop around them.

Importing torch takes seconds and forking takes milliseconds, so the launcher pays for the import once and forks every
worker from itself. ``worker_pool.py`` says why that is safe.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, final

from phalanx.config import RunSpec
from phalanx.config.run import TIMEOUT
from phalanx.device_kinds import all_kinds, kind_for
from phalanx.errors import RefusedError, RunError, SpecError
from phalanx.launch.failure import Failure, memory_kills, refusal, signal_name, worker_error
from phalanx.launch.hangs import HangWatch
from phalanx.launch.jobfile import load_job
from phalanx.launch.reaper import StopRequest, raise_stopped
from phalanx.launch.restarts import Restarts
from phalanx.launch.torch_warmup import make_ready
from phalanx.launch.worker_pool import WorkerPool
from phalanx.launch.worker_process import Launch, WorkerFunction

if TYPE_CHECKING:
    from phalanx.launch.targets.target import AttachedTarget


_TICK = 0.05  # seconds that workers are followed for at a time
_WATCH = 0.1  # seconds between calls of watch


@final
class LocalLauncher:
    """Forks the workers from this process; even one ended by ``kill -9`` leaves none behind."""

    def prepare(self, launch: Launch) -> None:
        """Refuse to fork a process that uses an accelerator, and load what the plan needs once for all workers.

        Raises:
            RefusedError: the devices of the plan cannot be used by forked workers.
            RunError: this process uses an accelerator.
        """
        for kind in all_kinds():
            if kind.in_use():
                raise RunError(
                    f"this process already uses {kind.label}, and workers forked from it could not\n"
                    f"    try: phalanx train JOB from the command line, or move {kind.label} work "
                    f"({kind.heavy_ways}) out of the module level of the job file and into model() and data()"
                )
        if launch.run and not (kind := kind_for(launch.run.plan.device, launch.run.plan.devices)).forks:
            given = f"{kind.label} devices, which forked workers cannot use"
            fix = f"torchrun --nproc-per-node {launch.world_size} --no-python phalanx worker run.toml"
            raise RefusedError.of("device", given, "workers that torchrun starts, from a run file", fix)
        if launch.run:
            make_ready(launch.run.plan)
            if launch.run.resume is True:
                importlib.import_module("phalanx.checkpoint.store")  # takes as long as torch, in each worker


def launch(
    function: WorkerFunction,
    world_size: int,
    *,
    watch: Callable[[], None] | None = None,
    timeout: float = TIMEOUT,
) -> list[Any]:
    """Run ``function(place, report_step)`` in ``world_size`` forked workers; return their results in rank order.

    For work that is no run, such as taking a proof's measurements. Arguments are those of ``Launch`` and ``supervise``.

    Raises:
        RunError: workers cannot be forked from this process.
    """
    wanted = Launch(world_size=world_size, function=function, timeout=timeout)
    LocalLauncher().prepare(wanted)
    return supervise(lambda: wanted, watch).results


def supervise(
    wanted: Callable[[], Launch],
    watch: Callable[[], None] | None = None,
    *,
    grace: float = 0.0,
    restarts: Restarts | None = None,
) -> WorkerPool:
    """Start workers, follow them to their end, and end those that are left.

    ``wanted()`` returns the launch before each start. The first failure ends all workers within 3 s. After a stop
    signal a run saves within ``grace`` seconds and ends; without ``grace``, or by a second Ctrl-C or SIGTERM, it ends
    at once. ``watch`` is called about ten times a second, and once more at the end. Lost workers are started again as
    often as ``restarts`` allows.

    Returns:
        The workers, which have all ended without a failure.

    Raises:
        SpecError: a worker refused the job or the plan.
        WorkerError: a worker failed; it names the first one, with its traceback.
        RunError: workers could not be started or watched.
        KeyboardInterrupt: after Ctrl-C.
        SystemExit: after another stop signal.
    """
    with StopRequest(partial(raise_stopped, saved=False)) as stop:
        while True:
            kills_before, launch = memory_kills(), wanted()
            workers, hung = _follow(launch, grace, stop, watch, restarts)
            failure, kills = hung or workers.failure(), memory_kills() - kills_before
            if failure is None:
                break
            error = refusal(failure) or worker_error(failure, launch.world_size, memory_kills=kills)
            if stop.number:
                print(error, file=sys.stderr)
                raise_stopped(stop.number, saved=False)
            begun = max((one.step for one in workers.failures if one.step is not None), default=None)
            if restarts is None or not restarts.allow(failure, begun=begun):
                raise error
            until = time.monotonic() + restarts.pause
            while time.monotonic() < until:
                time.sleep(_TICK)
                raise_stopped(stop.number, saved=False)
        raise_stopped(stop.number or workers.stopped, saved=True)
        if watch:
            watch()
        return workers


def _follow(
    launch: Launch,
    grace: float,
    stop: StopRequest,
    watch: Callable[[], None] | None,
    restarts: Restarts | None,
) -> tuple[WorkerPool, Failure | None]:
    """Start workers, follow them and end them. Return the workers, and the hang that ended the run, if one did."""
    stop.held = True
    workers = WorkerPool(launch)
    try:
        workers.start()
        hangs = HangWatch(workers.watched, launch.timeout)
        if restarts:
            restarts.started()
        stop.held = False
        more, hung, deadline, next_watch = True, None, 0.0, 0.0
        while more and not hung:
            more, now = workers.follow(_TICK), time.monotonic()
            if stop.number and not deadline and grace and workers.request_stop(stop.number):
                deadline = now + grace
                with suppress(OSError):  # a terminal that is closed
                    left = f"saving after this step, {grace:g} s at most; a second Ctrl-C or SIGTERM ends it at once"
                    print(f"{signal_name(stop.number)}: {left}", file=sys.stderr)
            if now >= deadline:
                raise_stopped(stop.number, saved=False)
            if more:
                hung = hangs.look()
            if watch and now >= next_watch:
                watch()
                next_watch = now + _WATCH
        hung = hung or _blamed(workers, hangs)
    finally:
        stop.held = True
        workers.stop()
        stop.held = False
    return workers, hung


def _blamed(workers: WorkerPool, hangs: HangWatch) -> Failure | None:
    """Return the hang behind a worker's report of a lost peer, if the hang watch finds one."""
    first = workers.failure()
    found = hangs.blamed(first, workers.failures) if first else None
    return None if found is first else found  # as workers are ended it may come out who was lost


def find_launcher(given: str | LocalLauncher | AttachedTarget) -> LocalLauncher | AttachedTarget:
    """Return the launcher called ``local``; for ``ssh:hosts.toml`` the target with the hosts of that file.

    Raises:
        SpecError: there is none of that name, or the file is wrong.
    """
    from phalanx.launch.targets.find_target import find_target
    from phalanx.launch.targets.target import AttachedTarget

    found = LocalLauncher() if given == "local" else given
    found = find_target(found) if isinstance(found, str) and ":" in found else found
    if isinstance(found, LocalLauncher | AttachedTarget):
        return found
    raise SpecError.of(where="launcher", given=repr(given), allowed="local, ssh:hosts.toml", fix='launcher="local"')


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


def refuse_what_needs_a_fork(run: RunSpec, name: str, *, loadable: bool) -> None:
    """Refuse a run on the target ``name`` whose job new processes cannot load.

    Raises:
        SpecError: only this process has the job, or it is not where the run says.
    """
    if not loadable:
        given = f"{name}, for a job that only this process has"
        allowed = "a job that new processes can load: run= with the file or module it is in"
        spec = 'run=px.RunSpec(job="train.py:job", plan=plan, folder=folder)'
        raise SpecError.of("launcher", given, allowed, f'px.fit(job(), {spec}, launcher="{name}")')
    load_job(run.job)
