"""Workers on this machine, forked from a process that has already imported torch.

Importing torch takes seconds and forking takes milliseconds, so the launcher pays for the import once and forks every
worker from itself. ``worker_pool.py`` says why that is safe.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

from phalanx.config import RunSpec
from phalanx.config.run import TIMEOUT
from phalanx.device_kinds import all_kinds, kind_for
from phalanx.errors import RefusedError, RunError, SpecError
from phalanx.launch.jobfile import load_job
from phalanx.launch.supervision import supervise
from phalanx.launch.torch_warmup import make_ready
from phalanx.launch.worker_pool import WorkerPool
from phalanx.launch.worker_process import Launch, WorkerFunction

if TYPE_CHECKING:
    from phalanx.launch.targets.target import AttachedTarget


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

    def start(self, launch: Launch) -> WorkerPool:
        pool = WorkerPool(launch)
        try:
            pool.start()
        except BaseException:
            pool.stop()
            raise
        return pool


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
    launcher = LocalLauncher()
    wanted = Launch(world_size=world_size, function=function, timeout=timeout)
    launcher.prepare(wanted)
    return supervise(launcher.start, lambda: wanted, watch).results


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
