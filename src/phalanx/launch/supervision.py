"""The loop around the workers of a launch: starts, restarts, hangs, stop signals, and the error that is raised."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from phalanx.launch.failure import Failure, memory_kills, refusal, signal_name, worker_error
from phalanx.launch.hangs import HangWatch
from phalanx.launch.reaper import StopRequest, raise_stopped
from phalanx.launch.restarts import Restarts
from phalanx.launch.worker_pool import WorkerPool
from phalanx.launch.worker_process import Launch

_TICK = 0.05  # seconds that workers are followed for at a time
_WATCH = 0.1  # seconds between calls of watch


def supervise(
    start: Callable[[Launch], WorkerPool],
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
            workers, hung = _follow(start, launch, grace, stop, watch, restarts)
            failure, kills = hung or workers.failure(), memory_kills() - kills_before
            if failure is None:
                break
            error = refusal(failure) or worker_error(failure, launch.world_size, memory_kills=kills)
            if stop.number:
                print(error, file=sys.stderr)
                raise_stopped(stop.number, saved=False)
            begun = max((one.step for one in workers.failures if one.step is not None), default=None)
            if restarts is None or not restarts.allow(failure, memory_kills=kills, begun=begun):
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
    start: Callable[[Launch], WorkerPool],
    launch: Launch,
    grace: float,
    stop: StopRequest,
    watch: Callable[[], None] | None,
    restarts: Restarts | None,
) -> tuple[WorkerPool, Failure | None]:
    """Start workers, follow them and end them. Return the workers, and the hang that ended the run, if one did."""
    stop.held = True
    workers = start(launch)
    try:
        hangs = HangWatch(workers.watched, launch.timeout)
        if restarts:
            restarts.started()
        stop.held = False
        more, hung, deadline, next_watch = True, None, 0.0, 0.0
        while more and not hung:
            more, now = workers.follow(_TICK), time.monotonic()
            if stop.number and not deadline and grace and workers.request_stop(stop.number):
                deadline = now + grace
                _print_stopping(launch, stop.number, grace)
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


def _print_stopping(launch: Launch, number: int, grace: float) -> None:
    begins = "asked to stop" if launch.background else signal_name(number)
    ends = "" if launch.background else "; Ctrl-C ends the run at once"
    with suppress(OSError):  # a terminal that is closed
        print(f"{begins}: saving after this step, {grace:g} s at most{ends}", file=sys.stderr)
