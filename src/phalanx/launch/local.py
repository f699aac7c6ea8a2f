"""Workers on this machine, forked from a process that has already imported torch.

Importing torch takes seconds and forking takes milliseconds, so the launcher pays for the import once and forks every
worker from itself. ``worker_pool.py`` says what makes that safe.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from phalanx.errors import RunError
from phalanx.launch.failure import first_failure, memory_kills, refusal, worker_error
from phalanx.launch.forked_worker import WorkerFunction
from phalanx.launch.reaper import Interrupts
from phalanx.launch.worker_pool import Hosts, WorkerPool

_TICK = 0.05  # seconds between looks at the workers while nothing is heard of them
_WATCH = 0.1  # seconds between calls of watch


def launch(
    function: WorkerFunction,
    world_size: int,
    *,
    watch: Callable[[], None] | None = None,
    hosts: Hosts | None = None,
    reserves: int = 0,
) -> list[Any]:
    """Run ``function(place, report_step)`` in ``world_size`` forked workers and return their results in rank order.

    The first failure ends all workers within 3 s. So do Ctrl-C and SIGTERM, which then go on as ``KeyboardInterrupt``
    and ``SystemExit``; even a launcher ended by ``kill -9`` leaves no process behind. What workers print comes out of
    this process's ``sys.stdout`` and ``sys.stderr``.

    Args:
        function: called in each worker with its place and a function that takes the number of the optimizer step the
            worker begins, which costs next to nothing. Its result must be JSON.
        world_size: workers; one is forked too, so that every fault looks alike.
        watch: called in this process about ten times a second, and once more when all workers are done.
        hosts: where workers are put; all on this machine where not given.
        reserves: how many killed workers are replaced by a process that begins anew, with the same rank.

    Raises:
        SpecError: a worker refused the job or the plan; it comes as what the worker raised.
        WorkerError: a worker failed; the first that did is named, with its own traceback.
        RunError: workers cannot be forked from this process.
    """
    _refuse_where_cuda_runs()
    kills_before = memory_kills()
    with Interrupts() as interrupts:
        pool = WorkerPool(function, world_size, hosts, reserves)
        try:
            pool.start()
            next_watch = 0.0
            while not pool.done and not pool.failures:
                pool.listen(_TICK)
                interrupts.check()
                if watch and time.monotonic() >= next_watch:
                    watch()
                    next_watch = time.monotonic() + _WATCH
            pool.await_other_failures()
        finally:
            interrupts.ending = True
            pool.end()
            interrupts.ending = False
        if pool.failures:
            failure = first_failure(pool.failures)
            raise refusal(failure) or worker_error(failure, world_size, memory_kills=memory_kills() - kills_before)
        if watch:
            watch()
        return [worker.result for worker in pool.workers]


def _refuse_where_cuda_runs() -> None:
    if torch.cuda.is_initialized():
        raise RunError(
            "this process already uses CUDA, and workers forked from it could not\n"
            "    try: phalanx train JOB from the command line, or move CUDA work (.cuda(), .to('cuda'), "
            "torch.cuda.synchronize()) out of the module level of the job file and into model() and data()"
        )
