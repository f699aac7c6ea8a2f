"""Which failures of workers a run is started again after, how often, with how many devices, and what its log says."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import final

from phalanx.config.run_files import CHECKPOINTS, EVENTS
from phalanx.events import EventLog
from phalanx.launch.elastic_size import ElasticSize, record_resize
from phalanx.launch.failure import Failure

_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE}
"""Signals that come from outside; the others are of a crash in the job's own code or in what it calls."""

_LONGEST = 30.0  # seconds between a failure and the next start

_SOON, _IN_A_ROW = 600.0, 3  # seconds after a start; losses of one rank that soon: a bad place, which is left out


@final
class Restarts:
    """The restarts of one run.

    A run is started again after a worker was lost: ended by a signal, cut off from its peers, or not come to an
    exchange within the timeout. Not after an exception of the job's own code, which would come again, nor where ranks
    were in different exchanges; nor where workers are lost in the same way at the same step again and nothing was saved
    in between: the second time, or the third if it came from outside, when chance is left out. A run whose number of
    devices may change then goes on with fewer, and also where one rank was lost three times running, each within ten
    minutes, though it came further in between. One that has just tried more goes back to fewer by whatever it fails,
    which is no restart that counts.

    Attributes:
        count: restarts so far.
        starts: how often workers have been started.
        pause: seconds to wait before the next start: none where the run has come further since the last, else 1, then
            2, 4 and so on.
        size: the number of devices; ``None`` where it does not change.
    """

    def __init__(self, limit: int, folder: Path, size: ElasticSize | None = None) -> None:
        """``folder`` is the run's."""
        self.count, self.starts, self.pause, self.size = 0, 0, 0.0, size
        self._limit, self._folder = limit, folder
        self._failures: list[tuple[object, ...]] = []
        self._furthest, self._idle = (-1, list[str]()), 0
        self._lost: Failure | None = None
        self._since, self._source, self._again = 0.0, "", 0
        self._begun, self._soon = time.monotonic(), list[int | None]()
        self._devices = size.devices if size else 0

    def allow(self, failure: Failure, *, memory_kills: int, begun: int | None = None) -> bool:
        """Whether the run is to be started again after ``failure``; ``memory_kills``: see ``worker_error``.

        ``begun``: the last step that a worker which failed had begun, if any had.
        """
        size, cause = self.size, _cause(failure)
        if size:
            size.reached(failure.step)
            if size.on_trial and not failure.problems:
                size.go_back(cause)
                self.pause = 0.0
                return True
        short = size is not None and size.lacks_devices()
        if self.count >= self._limit or not (failure.is_loss or short):
            return False
        nowhere, often = self._repeated(failure, memory_kills), self._lost_soon(failure)
        if short or nowhere or (size and often):
            why = "fewer devices are there" if short else f"{cause}, again and again"
            if size and size.shrink(why):
                self._forget()
            elif short or nowhere:
                return False
        self.pause = min(_LONGEST, 2.0 ** (self._idle - 1)) if self.count and self._idle else 0.0
        self.count += 1
        self._lost, self._since = failure, time.monotonic()
        self._source, self._again = _source(self._folder, failure.step if begun is None else begun)
        return True

    def grow(self) -> None:
        """The run has stopped to go on with more devices."""
        assert self.size
        self.size.grow()
        self._forget()

    def started(self) -> None:
        """Workers have been started; the second time and later the log says why."""
        self.starts += 1
        self._begun = time.monotonic()
        failure, self._lost = self._lost, None
        if failure:
            with EventLog(self._folder / EVENTS) as log:
                if failure.hang:
                    log.write("hang", step=failure.step, **failure.hang)
                log.write(
                    "restart",
                    rank=failure.rank,
                    step=failure.step,
                    cause=_cause(failure),
                    restarts=self.count,
                    source=self._source,
                    again=self._again,
                    seconds=time.monotonic() - self._since,
                )
        if self.size:
            self.size.started()
            before, self._devices = self._devices, self.size.devices
            if before != self._devices:
                record_resize(self._folder, before, self._devices, self.size.cause)

    def _repeated(self, failure: Failure, memory_kills: int) -> bool:
        """Whether it is the same as before, with nothing saved in between, too often for chance."""
        outside = failure.lost_peer or (failure.signal in _OUTSIDE and not memory_kills)
        saved, step = self._saved(), -1 if failure.step is None else failure.step
        this = (failure.step, failure.rank, failure.kind, saved)
        often = 3 if outside and failure.step is not None else 2
        self._failures.append(this)
        if self._failures[-often:] == [this] * often:
            return True
        furthest, known = self._furthest
        self._idle = 0 if step > furthest or saved != known else self._idle + 1
        self._furthest = max(step, furthest), saved
        return False

    def _lost_soon(self, failure: Failure) -> bool:
        """Whether this rank alone was lost the last three times, each soon after workers were started."""
        if time.monotonic() > self._begun + _SOON:
            self._soon.clear()
            return False
        self._soon.append(failure.rank)
        return self._soon[-_IN_A_ROW:] == [failure.rank] * _IN_A_ROW

    def _forget(self) -> None:
        """Begin to count anew: what failed did so on another number of devices."""
        self._failures.clear()
        self._soon.clear()
        self._idle = 0

    def _saved(self) -> list[str]:
        from phalanx.checkpoint.folder import newest_first

        return [path.name for path in newest_first(self._folder / CHECKPOINTS)]


def _cause(failure: Failure) -> str:
    when = "before the first step" if failure.step is None else f"in step {failure.step}"
    if failure.signal:
        return f"rank {failure.rank} was ended by {failure.message} {when}"
    if failure.hang:
        return failure.message
    if failure.lost_peer:
        return f"rank {failure.rank} was cut off from its peers {when}"
    return f"rank {failure.rank} failed {when}: {failure.kind}"


def _source(folder: Path, begun: int | None) -> tuple[str, int]:
    """Return where the run in ``folder`` resumes from, in words, and how many steps it computes again.

    ``begun``: the last step that was begun, if one was; all before it are taken.
    """
    from phalanx.checkpoint import latest
    from phalanx.checkpoint.format import step_of

    newest = latest(folder / CHECKPOINTS)
    step = (step_of(newest) or 0) if newest else 0
    again = max(0, (begun or 0) - step)
    how_many = "no step is" if not again else "1 step is" if again == 1 else f"{again} steps are"
    if newest is None:
        return f"from the beginning, for nothing was saved; {how_many} computed again", again
    return f"from the checkpoint of step {step}; {how_many} computed again", again
