"""Workers on this machine, forked from a process that has already imported torch.

Importing torch takes seconds and forking takes milliseconds, so the launcher pays for the import once and forks every
worker from itself. ``worker_pool.py`` says what makes that safe.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, final

from phalanx.config.run import TIMEOUT
from phalanx.device_kinds import all_kinds, kind_for
from phalanx.errors import RefusedError, RunError
from phalanx.launch.launcher import Launch, Launcher, WorkerFunction
from phalanx.launch.supervision import supervise
from phalanx.launch.torch_warmup import make_ready
from phalanx.launch.worker_pool import WorkerPool


@final
class LocalLauncher(Launcher):
    """Forks the workers from this process; even one ended by ``kill -9`` leaves none behind."""

    def prepare(self, launch: Launch) -> None:
        """Refuse to fork a process that uses an accelerator, and load what the plan needs once for all workers."""
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
    """Run ``function(place, report_step)`` in ``world_size`` forked workers and return their results in rank order.

    For what no run file can say, such as taking a proof's measurements; one worker is forked, too, so that every fault
    looks alike. Arguments are those of ``Launch`` and ``supervise``, and so are errors and ends.

    Raises:
        RunError: workers cannot be forked from this process.
    """
    launcher = LocalLauncher()
    wanted = Launch(world_size=world_size, function=function, timeout=timeout)
    launcher.prepare(wanted)
    return supervise(launcher.start, lambda: wanted, watch).results
