"""The learning rate of each parameter group in each step: the job's schedule, or torch's scheduler on its optimizer.

A learning-rate scheduler of torch's on a job's optimizer: honoured where it says all there is to say, else refused. It
sets the rates of the optimizer it was made for. A job that makes one steps it by a hook of that optimizer, once an
optimizer step under every plan; nobody else does. Where the job has a schedule of Phalanx's own as well, or a factor on
its rates, two would write the same numbers. Its state is in no checkpoint: a run with one cannot be resumed. One that
the job gives beside the optimizer is stepped by the run, and saved (``torch_scheduler.py``).
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
from phalanx.config.run_files import EVENTS
from phalanx.errors import Problem, RefusedError
from phalanx.events import read
from phalanx.train.torch_scheduler import MadeOptimizer, given_scheduler_problems


class LearningRates:
    """Sets an optimizer's learning rates before each step.

    A rate is what the optimizer began with, times the schedule's factor and ``scale``. Where neither changes anything,
    what a hook of the optimizer or a loop of the user's own sets between steps stands.
    """

    def __init__(
        self, job: Job, optimizer: torch.optim.Optimizer, *, total_steps: int, scale: float, scheduled: bool = False
    ) -> None:
        """``scheduled``: a scheduler of torch's sets the rates, of which the first group's is read here."""
        self._batch, self._schedule = job.batch, job.lr_schedule
        self._groups, self._scheduled = optimizer.param_groups, scheduled
        self._total_steps, self._scale = total_steps, scale
        self._base = [float(group["lr"]) for group in self._groups]
        self._set = list(self._base)

    def set(self, step: int) -> float:
        """Set the rates of ``step``; gives that of the first group.

        Raises:
            RefusedError: if something else has set one that the job's schedule sets, too.
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
    """What is to be said where a run that goes on at ``step`` has another length than before, and with it other rates.

    ``folder`` is the run's, whose event log says what its length was.
    """
    if not total_steps or not (log := folder / EVENTS).exists():
        return []
    lengths = [event.get("total_steps") for event in read(log) if event["event"] == "start"]
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
    """One sentence where a run that goes on at ``step`` has no step left to take; ``None`` steps: not known."""
    if total_steps is None or step < total_steps:
        return []
    return [
        f"no step is left: the run has taken {step}, and its job has {total_steps}. More `steps` or `epochs` let it go "
        "on."
    ]


_BESIDE = "optimizer=lambda params: ..., with `return optimizer, scheduler` at its end, and no hook"


def scheduler_on(optimizer: torch.optim.Optimizer) -> str:
    """The name of the scheduler of torch's that was made for ``optimizer``; empty where there is none."""
    if not getattr(optimizer.step, "_wrapped_by_lr_sched", False):
        return ""
    known = (one for one in gc.get_objects() if issubclass(type(one), LRScheduler))
    return next((type(one).__name__ for one in known if one.optimizer is optimizer), "a scheduler of torch's")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStart:
    """How a run begins.

    Attributes:
        lr_scale: a factor on every learning rate.
        resumes: whether it goes on from a checkpoint, or goes back to one on its way.
        step: the optimizer step that it takes first; that of the checkpoint, once it has been read.
        checkpoint: that it goes on from, where the look at the job is to be held against it.
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
    """What keeps a scheduler on the optimizer, if there is one, from being honoured."""
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
    """What is to be said of a scheduler that is honoured."""
    if not (name := scheduler_on(optimizer)):
        return []
    told = "its state is in no checkpoint, so the run cannot be resumed: give (optimizer, scheduler)"
    return [f"learning rates are those that {name} sets; {told}."]
