"""Restarts of a run after workers were lost: after which failures, how often, with how many devices.

A run with a range of devices (``-n 1:4``, or as many workers as torchrun has started) begins with the most that are
there. It continues with fewer when workers are lost twice in the same way, or devices are gone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self, final

from phalanx.config import Job, Plan, RunSpec
from phalanx.config.batching import smaller_batches
from phalanx.config.elastic import plans_of
from phalanx.config.run_files import CHECKPOINTS, EVENTS
from phalanx.device_kinds import kind_for
from phalanx.errors import Problem, RefusedError, SpecError
from phalanx.events import EventLog
from phalanx.files import read_text
from phalanx.launch.failure import Failure
from phalanx.launch.runfile import newest_step
from phalanx.train.assembly import refuse

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


@final
class ElasticSize:
    """The number of devices of one run, from start to start.

    Attributes:
        plans: the plan for each number of devices in the run's range, the fewest first.
        devices: the present number: the most that this machine has, until ``shrink``.
        cause: why the number changed last, in words.
    """

    def __init__(self, plans: Mapping[int, Plan], there: Callable[[], float]) -> None:
        """``there()`` returns the number of devices of this machine."""
        self.plans, self.cause, self._there = dict(plans), "", there
        self.devices = max((size for size in self.plans if size <= there()), default=min(self.plans))

    @classmethod
    def of(cls, job: Job, run: RunSpec) -> Self:
        """Return the size that ``run`` begins with.

        Raises:
            RefusedError: no number of devices in its range can serve the job here.
        """
        plans = allowed_plans(job, run)
        kind = kind_for(run.plan.device, next(iter(plans)))
        return cls(plans, (lambda: math.inf) if kind.on_host else kind.count)

    @property
    def plan(self) -> Plan:
        """The plan for the present number of devices."""
        return self.plans[self.devices]

    @property
    def numbers(self) -> str:
        """The numbers of devices in the run's range, in words."""
        *others, last = (f"{size:,}" for size in self.plans)
        return f"{', '.join(others)} or {last}" if others else last

    def shrink(self, cause: str) -> bool:
        """Continue with fewer devices, because of ``cause``. Return False if there is no smaller number."""
        fewer = [size for size in self.plans if size < self.devices and size <= self._there()]
        if fewer:
            self.devices, self.cause = max(fewer), cause
        return bool(fewer)

    def lacks_devices(self) -> bool:
        """Return True if this machine has fewer devices than the run."""
        return self._there() < self.devices


def allowed_plans(job: Job, run: RunSpec) -> dict[int, Plan]:
    """The plan on each number of devices that ``run`` may have here, with ``job``, the fewest first.

    Raises:
        RefusedError: if there is none; as for the most devices that the plan could be on.
    """
    asked, within = run.asked_plan or run.plan, run.device_range
    assert within is not None
    allowed: dict[int, Plan] = {}
    refused = RefusedError([_more_than_samples(run, job)])
    for size, plan in plans_of(asked, within, job.batch, *smaller_batches(job)).items():
        try:
            refuse(job, plan, plan.world_size)
            allowed[size] = plan
        except RefusedError as error:
            refused = error
    if not allowed:
        raise refused
    return allowed


def fitted(run: RunSpec, world_size: int, job: Job) -> RunSpec:
    """``run`` under its plan for as many workers as there are; as it is where its number of devices is the plan's.

    For workers that are started by who does not ask how many they are to be, such as torchrun on several hosts.

    Raises:
        RefusedError: if the run cannot have so many.
    """
    asked, within = run.asked_plan or run.plan, run.device_range
    if within is None:
        return run
    sizes = {plan.world_size: plan for plan in plans_of(asked, within, job.batch, *smaller_batches(job)).values()}
    if world_size not in sizes:
        numbers = ", ".join(map(str, sizes)) or "none"
        given, allowed = f"{world_size}", f"{numbers}, as the plan {asked} on {within} devices says"
        fix = f"torchrun --nproc-per-node {max(sizes, default=1)} --no-python phalanx worker run.toml"
        raise RefusedError.of(where="workers", given=given, allowed=allowed, fix=fix)
    return run.resized_to(sizes[world_size])


def record_resize(folder: Path, before: int, to: int, cause: str) -> None:
    """Have the log of the run in ``folder`` say that it goes on with another number of devices."""
    with EventLog(folder / EVENTS) as log:
        log.write("resize", **{"from": before}, to=to, step=newest_step(folder) or 0, cause=cause)


def devices_before(folder: Path) -> int:
    """With how many devices the run in ``folder`` has begun last; 0 where it has not."""
    try:
        text = read_text(folder / "plan.toml", where="plan.toml", fix="a new run folder")
        return Plan.from_toml(text).devices
    except SpecError:
        return 0


def _more_than_samples(run: RunSpec, job: Job) -> Problem:
    given = f"{run.devices} with plan {run.asked_plan or run.plan}, each of whose replicas needs a sample"
    least = min((job.batch, *smaller_batches(job)))
    allowed = f"a range with fewer devices, for a global batch of {least}"
    return Problem(where="run.devices", given=given, allowed=allowed, fix=f"-n 1:{least}")
