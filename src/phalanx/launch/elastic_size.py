"""With how many devices a run goes on whose number of devices may change.

It begins with the most there are. Where workers are lost again and again, or devices are gone, it goes on with fewer;
after a while it tries the most again, and goes back at once where that fails as well.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self, final

from phalanx.config import Job, Plan, RunSpec
from phalanx.config.batch_ramp import smaller_batches
from phalanx.config.elastic import plans_of
from phalanx.config.run_files import EVENTS
from phalanx.device_kinds import kind_for
from phalanx.errors import Problem, RefusedError, SpecError
from phalanx.events import EventLog
from phalanx.files import read_text
from phalanx.launch.runfile import newest_step
from phalanx.train.assembly import refuse


@final
class ElasticSize:
    """The number of devices of one run, from start to start.

    Attributes:
        plans: the plan on each number of devices that the run may have, the fewest first.
        devices: how many it has now, or begins with next.
        cause: why they are that many, after the first; in words.
    """

    def __init__(
        self, plans: Mapping[int, Plan], *, steps: int = 0, seconds: float = 0.0, there: Callable[[], float]
    ) -> None:
        """``there()``: devices that this machine has. More are tried after ``steps``, or ``seconds``; 0: never."""
        self.plans, self.cause = dict(plans), ""
        self._there, self._in_steps = there, steps > 0
        self._usual = self._wait = float(steps or seconds)
        self.devices = self._most()
        self._before = 0  # devices of a run that has tried more, until these have proven themselves
        self._began, self._first_step, self._step = time.monotonic(), -1, -1

    @classmethod
    def of(cls, job: Job, run: RunSpec) -> Self:
        """That of ``run``, which begins.

        Raises:
            RefusedError: if no number of devices in its range can serve the job here; as for the most of them.
        """
        plans = allowed_plans(job, run)
        kind = kind_for(run.plan.device, next(iter(plans)))
        there = (lambda: math.inf) if kind.on_host else kind.count
        return cls(plans, steps=run.grow_steps, seconds=run.grow_seconds, there=there)

    @property
    def plan(self) -> Plan:
        """The plan on as many devices as the run has now."""
        return self.plans[self.devices]

    @property
    def numbers(self) -> str:
        """The numbers of devices that the run may have, in words."""
        *others, last = (f"{size:,}" for size in self.plans)
        return f"{', '.join(others)} or {last}" if others else last

    @property
    def on_trial(self) -> bool:
        """Whether the run has tried more devices, and not gone on with them for as long as it waited before."""
        return self._before > 0 and self._elapsed() < self._wait

    def started(self) -> None:
        """Workers have been started with this number of devices."""
        self._began, self._first_step, self._step = time.monotonic(), -1, -1

    def reached(self, step: int | None) -> None:
        """Take in the step that workers have begun last; ``None``: none yet."""
        if step is not None:
            self._first_step = step if self._first_step < 0 else self._first_step
            self._step = max(step, self._step)
        if self._before and not self.on_trial:
            self._before, self._wait = 0, self._usual

    def grows(self) -> bool:
        """Whether it is time to try more devices, and there are more."""
        return 0 < self._wait <= self._elapsed() and self._most() > self.devices

    def grow(self) -> None:
        """The run has stopped to go on with more devices."""
        self._before, self.devices, unit = self.devices, self._most(), "steps" if self._in_steps else "s"
        self.cause = f"after {self._wait:g} {unit} with {self._before}, {self.devices} are tried again"
        self.started()

    def go_back(self, cause: str) -> None:
        """The run that has tried more devices has failed by ``cause``: it waits twice as long for the next time."""
        self.devices, self._before, self.cause = self._before, 0, cause
        self._wait *= 2

    def shrink(self, cause: str) -> bool:
        """Go on with fewer devices, because of ``cause``. Returns False where there is no smaller number."""
        fewer = [size for size in self.plans if size < self.devices and size <= self._there()]
        if not fewer:
            return False
        self.devices, self._before, self._wait, self.cause = max(fewer), 0, self._usual, cause
        return True

    def lacks_devices(self) -> bool:
        """Whether fewer devices are there than the run has."""
        return self._there() < self.devices

    def _most(self) -> int:
        return max((size for size in self.plans if size <= self._there()), default=min(self.plans))

    def _elapsed(self) -> float:
        return self._step - self._first_step if self._in_steps else time.monotonic() - self._began


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
