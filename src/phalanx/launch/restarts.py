"""Restarts of a run after workers were lost: after which failures, how often, with how many devices."""

from __future__ import annotations

import time
from pathlib import Path
from typing import final

from phalanx.config.run_files import CHECKPOINTS, EVENTS
from phalanx.events import EventLog
from phalanx.launch.elastic_size import ElasticSize, record_resize
from phalanx.launch.failure import Failure

_LONGEST = 30.0  # seconds between a failure and the next start


@final
class Restarts:
    """The restarts of one run, from the newest checkpoint.

    A run restarts after a worker was lost: ended by a signal, cut off from its peers, or not come to an exchange within
    the timeout. It does not restart after an exception of the job's own code, nor after ranks were in different
    exchanges. The same loss twice in a row, with no new checkpoint in between, ends the run. A run whose number of
    devices may change then continues with fewer.

    Attributes:
        count: restarts so far.
        starts: how often workers have been started.
        pause: seconds to wait before the next start: 0 at first, then 1, 2, 4 and so on.
        size: the number of devices; ``None`` if it does not change.
    """

    def __init__(self, limit: int, folder: Path, size: ElasticSize | None = None) -> None:
        """``folder`` is the run's."""
        self.count, self.starts, self.pause, self.size = 0, 0, 0.0, size
        self._limit, self._folder = limit, folder
        self._before: tuple[object, ...] = ()
        self._lost: Failure | None = None
        self._since, self._source, self._again = 0.0, "", 0
        self._devices = size.devices if size else 0

    def allow(self, failure: Failure, *, begun: int | None = None) -> bool:
        """Return True if the run restarts after ``failure``.

        ``begun``: the last step that a failed worker had begun; ``None`` if none had.
        """
        size = self.size
        short = size is not None and size.lacks_devices()
        if self.count >= self._limit or not (failure.is_loss or short):
            return False
        before, self._before = self._before, (failure.step, failure.rank, failure.kind, self._saved())
        if self._before == before or short:
            why = "fewer devices are there" if short else f"{_cause(failure)}, again and again"
            if not (size and size.shrink(why)):
                return False
            self._before = ()
        self.pause = min(_LONGEST, 2.0 ** (self.count - 1)) if self.count else 0.0
        self.count += 1
        self._lost, self._since = failure, time.monotonic()
        self._source, self._again = _source(self._folder, failure.step if begun is None else begun)
        return True

    def started(self) -> None:
        """Count a start of workers; write to the log why they were started again."""
        self.starts += 1
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
        if self.size and self._devices != self.size.devices:
            record_resize(self._folder, self._devices, self.size.devices, self.size.cause)
            self._devices = self.size.devices

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
