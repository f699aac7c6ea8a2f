"""The loop that sees a launch through to its end: starts, restarts, hangs, signals, and the error that is raised."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from phalanx.launch.failure import Failure, memory_kills, refusal, signal_name, worker_error
from phalanx.launch.hang_watch import HangWatch
from phalanx.launch.launcher import Launch, Workers
from phalanx.launch.reaper import RESIZE, Interrupts
from phalanx.launch.restarts import Restarts
from phalanx.launch.straggler_watch import StragglerWatch

_TICK = 0.05  # seconds that workers are followed for at a time
_WATCH = 0.1  # seconds between calls of watch

_Started = TypeVar("_Started", bound=Workers)


def supervise(
    start: Callable[[Launch], _Started],
    wanted: Callable[[], Launch],
    watch: Callable[[], None] | None = None,
    *,
    grace: float = 0.0,
    restarts: Restarts | None = None,
) -> _Started:
    """Start workers, follow them to their end, and stop whatever is left of them.

    ``wanted()`` says before each start what is to be started. The first failure ends all workers within 3 s. Signals
    that ask to stop have a run save within ``grace`` seconds and stop; without that they, and a second Ctrl-C or
    SIGTERM, end all workers at once. Either goes on as ``KeyboardInterrupt`` or ``SystemExit``. ``watch`` is called in
    this process about ten times a second, and once more when all are done. A rank that does not come to where others
    wait for it, within the timeout of what was started, is the one that failed. Workers that were lost are started
    again as often as ``restarts`` says, and workers of a run that is to have more devices once they have saved.

    Returns:
        The workers, all of which did what they were to do and are gone.

    Raises:
        SpecError: a worker refused the job or the plan; it comes as what the worker raised.
        WorkerError: a worker failed; the first that did is named, with its own traceback.
        RunError: workers could not be started or watched.
    """
    with Interrupts() as interrupts:
        while True:
            kills_before, launch = memory_kills(), wanted()
            workers, hung, growing = _follow(start, launch, grace, interrupts, watch, restarts)
            failure, kills = hung or workers.failure(), memory_kills() - kills_before
            if failure is None and not (growing and workers.stopped and not interrupts.caught):
                break
            if failure is None:
                assert restarts
                restarts.grow()
                continue
            error = refusal(failure) or worker_error(failure, launch.world_size, memory_kills=kills)
            if interrupts.caught:
                print(error, file=sys.stderr)  # what goes on is the signal
                interrupts.check()
            begun = max((one.step for one in workers.known_failures() if one.step is not None), default=None)
            if restarts is None or not restarts.allow(failure, memory_kills=kills, begun=begun):
                raise error
            until = time.monotonic() + restarts.pause
            while time.monotonic() < until:
                time.sleep(_TICK)
                interrupts.check()
        interrupts.caught, interrupts.saved = interrupts.caught or workers.stopped, True
        interrupts.check()
        if watch:
            watch()
        return workers


class _Watches:
    """Who looks at how workers of one start go on: whether any hangs, keeps others waiting, or there could be more.

    Attributes:
        growing: the workers have been asked to stop, for the run to go on with more devices.
    """

    def __init__(
        self,
        workers: Workers,
        launch: Launch,
        interrupts: Interrupts,
        watch: Callable[[], None] | None,
        restarts: Restarts | None,
    ) -> None:
        run = launch.run
        self.growing = False
        self._workers, self._interrupts, self._watch, self._restarts = workers, interrupts, watch, restarts
        self._hangs = HangWatch(workers.watched, launch.timeout, run.plan if run else None)
        # workers of servers take their steps each at its own pace
        paced = run if run and launch.world_size > 1 and not run.plan.server else None
        self._stragglers = StragglerWatch(workers.watched, paced.plan, paced.folder) if paced else None
        self._next_watch = 0.0

    def look(self) -> Failure | None:
        """Take in how workers go on. Returns how the run failed where it has to be ended from here."""
        if self._stragglers:
            self._stragglers.look()
        return self._hangs.look()

    def tell(self) -> None:
        """About ten times a second: call who watches, and ask workers to stop where there are to be more."""
        if time.monotonic() < self._next_watch:
            return
        if self._watch:
            self._watch()
        size = self._restarts.size if self._restarts else None
        if size and not self.growing:
            size.reached(max((at.step for at in self._workers.watched().values() if at.step is not None), default=None))
            self.growing = not self._interrupts.caught and size.grows() and self._workers.request_stop(RESIZE)
        self._next_watch = time.monotonic() + _WATCH

    def blamed(self) -> Failure | None:
        """How the run failed, where a worker only says that another did not come; not yet ended are those that hang."""
        first = self._workers.failure()
        if first is None or not first.lost_peer:
            return None
        self._hangs.last_look()
        found = self._hangs.blamed(first, self._workers.known_failures())
        return None if found is first else found  # as workers are ended it may come out who was lost


def _follow(
    start: Callable[[Launch], _Started],
    launch: Launch,
    grace: float,
    interrupts: Interrupts,
    watch: Callable[[], None] | None,
    restarts: Restarts | None,
) -> tuple[_Started, Failure | None, bool]:
    """Start workers, follow them to their end, and stop them.

    Returns:
        The workers, how the run failed if the watches say so, and whether they were asked to stop for more devices.
    """
    interrupts.held = True
    workers, hung = start(launch), None
    try:
        watches = _Watches(workers, launch, interrupts, watch, restarts)
        if restarts:
            restarts.started()
        interrupts.held = False
        more, deadline = True, 0.0
        while more and not hung:
            more = workers.follow(_TICK)
            if interrupts.caught and not deadline and grace and workers.request_stop(interrupts.caught):
                deadline = time.monotonic() + grace
                text = _ASKED if launch.background else _STOPPING
                with suppress(OSError):  # a terminal that is closed
                    print(text.format(signal_name(interrupts.caught), grace), file=sys.stderr)
            if interrupts.caught and time.monotonic() >= deadline:
                interrupts.check()
            hung = watches.look() if more else None
            watches.tell()
        hung = hung or watches.blamed()
    finally:
        interrupts.held = True
        workers.stop()
        interrupts.held = False
    return workers, hung, watches.growing


_ASKED = "asked to stop: saving after this step, {1:g} s at most"
_STOPPING = "{}: saving after this step, {:g} s at most; Ctrl-C ends the run at once"
