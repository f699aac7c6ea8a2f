"""The learning rate of each parameter group in each step: the job's schedule, or torch's scheduler on its optimizer.

A learning-rate scheduler of torch's on a job's optimizer is used if it alone sets the rates, else refused. It sets the
rates of the optimizer it was made for. A job that makes one steps it by a hook of that optimizer, once an optimizer
step under every plan; Phalanx does not step it. If the job also has a schedule of Phalanx's, or a factor on its rates,
two would write the same numbers. Its state is in no checkpoint: a run with one cannot be resumed. A scheduler that the
job returns beside the optimizer is stepped by the run, and saved (``torch_scheduler.py``).
"""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from phalanx.config import Job, Plan, RunSpec, Schedule
from phalanx.errors import Problem, RefusedError
from phalanx.events import RunLog
from phalanx.train.torch_scheduler import MadeOptimizer, given_scheduler_problems


class LearningRates:
    """The learning rates of an optimizer, set before each step.

    A rate is the optimizer's first rate, times the schedule's factor and ``scale``. If neither changes it, rates set
    between steps by a hook of the optimizer or by a user's own loop are kept.
    """

    def __init__(
        self, job: Job, optimizer: torch.optim.Optimizer, *, total_steps: int, scale: float, scheduled: bool = False
    ) -> None:
        """Take the job's schedule; ``scheduled``: a scheduler of torch's sets the rates instead."""
        self._batch, self._schedule = job.batch, job.lr_schedule
        self._groups, self._scheduled = optimizer.param_groups, scheduled
        self._total_steps, self._scale = total_steps, scale
        self._base = [float(group["lr"]) for group in self._groups]
        self._set = list(self._base)

    def set(self, step: int) -> float:
        """Set the rates of ``step`` and return that of the first group.

        Raises:
            RefusedError: if other code has set a rate that the job's schedule sets, too.
        """
        if self._scheduled:
            return float(self._groups[0]["lr"])
        factor = self._scale * self._schedule.factor(step=step, batch=self._batch, total_steps=self._total_steps)
        for index, group in enumerate(self._groups):
            self._base[index] = self._base_of(index, group["lr"], step)
            rate = self._set[index] = self._base[index] * factor
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)  # a compiled or captured step reads this very tensor
            else:
                group["lr"] = rate
        return self._set[0]

    def _base_of(self, index: int, found: Any, step: int) -> float:
        if isinstance(found, torch.Tensor) and found.device.type != "cpu":
            return self._base[index]  # looking would wait for the device
        if math.isclose(float(found), self._set[index], rel_tol=1e-6):
            return self._base[index]
        if self._schedule == Schedule() and self._scale == 1.0:
            return float(found)
        had = f"where the schedule had set {self._set[index]:g}"
        given = f"a learning rate that something else set to {float(found):g} before step {step}, {had}"
        allowed = "one of the two: the job's schedule (and its factor), or what else sets the rate"
        raise RefusedError([Problem(where="job.optimizer", given=given, allowed=allowed, fix="schedule=px.Schedule()")])


def resume_notes(job: Job, folder: Path, *, step: int, total_steps: int | None) -> list[str]:
    """Return sentences for a run resumed at ``step`` whose length, and so its rates, have changed.

    The event log in ``folder`` has the former length.
    """
    if not total_steps:
        return []
    lengths = [event.get("total_steps") for event in RunLog(folder).named("start")]
    before = lengths[-1] if lengths else None
    if not before or before == total_steps:
        return []
    was, now = (
        job.lr_schedule.factor(step=step, batch=job.batch, total_steps=length) for length in (before, total_steps)
    )
    if math.isclose(was, now, rel_tol=1e-6):
        return []
    return [
        f"the schedule follows the length of the run, which was {before} steps and is {total_steps} now: step {step} is"
        f" taken at {now:.3g} of the optimizer's rate, where {was:.3g} was to be. To go on as before, the job says how"
        f" long its schedule is: px.Schedule(..., total_steps={before})."
    ]


def none_left(step: int, total_steps: int | None) -> list[str]:
    """Return a sentence if a run resumed at ``step`` has no step left; ``None`` steps: unknown."""
    if total_steps is None or step < total_steps:
        return []
    return [
        f"no step is left: the run has taken {step}, and its job has {total_steps}. More `steps` or `epochs` let it go "
        "on."
    ]


_BESIDE = "optimizer=lambda params: ..., with `return optimizer, scheduler` at its end, and no hook"


def scheduler_on(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of torch's scheduler made for ``optimizer``, or ""."""
    if not getattr(optimizer.step, "_wrapped_by_lr_sched", False):
        return ""
    known = (one for one in gc.get_objects() if issubclass(type(one), LRScheduler))
    return next((type(one).__name__ for one in known if one.optimizer is optimizer), "a scheduler of torch's")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStart:
    """The begin of a run.

    Attributes:
        lr_scale: a factor on every learning rate.
        resumes: whether it resumes from a checkpoint, or may return to one later.
        step: the first optimizer step; that of the checkpoint, once it has been read.
        checkpoint: the one to resume from, if the job is to be compared with it.
    """

    lr_scale: float = 1.0
    resumes: bool = False
    step: int = 0
    checkpoint: Path | None = None

    @classmethod
    def of(cls, run: RunSpec, step: int = 0) -> RunStart:
        return cls(lr_scale=run.lr_scale, resumes=run.resume is True or run.rolls_back, step=step)


START = RunStart()
"""From its first step on, with the job's own rates."""


def scheduler_problems(job: Job, plan: Plan, made: MadeOptimizer, start: RunStart = START) -> list[Problem]:
    """Return the problems of a scheduler on the optimizer, if there is one."""
    if made.scheduler is not None:
        return given_scheduler_problems(job, plan, made.scheduler, start.lr_scale)
    optimizer: torch.optim.Optimizer = made.optimizer
    if not (name := scheduler_on(optimizer)):
        return []
    instead = 'schedule=px.Schedule(decay="cosine", warmup_steps=100) of the job, and no scheduler on the optimizer'

    def wrong(given: str, allowed: str, fix: str) -> list[Problem]:
        return [Problem(where="job.optimizer", given=f"{name} on the optimizer {given}", allowed=allowed, fix=fix)]

    if job.lr_schedule != Schedule():
        return wrong(f"and {job.lr_schedule}", "one of the two: both set the learning rate", instead)
    if start.lr_scale != 1.0:
        return wrong(f"and a factor of {start.lr_scale:g} on every learning rate", "one of the two", instead)
    if plan.server:
        return wrong(f"under {plan}", "plans without servers, which step the optimizer slice by slice", instead)
    if start.resumes:
        beside = "one that the job gives beside its optimizer: as it is, its state is in no checkpoint"
        return wrong("of a run to resume or to roll back", beside, _BESIDE)
    if not optimizer._optimizer_step_post_hooks and not optimizer._optimizer_step_pre_hooks:
        allowed = "one that the job gives beside its optimizer: there is no loop of yours that would step it"
        return wrong("that nobody steps", allowed, _BESIDE)
    return []


def scheduler_notes(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the notes on a scheduler that is used."""
    if not (name := scheduler_on(optimizer)):
        return []
    told = "its state is in no checkpoint, so the run cannot be resumed: give (optimizer, scheduler)"
    return [f"learning rates are those that {name} sets; {told}."]
