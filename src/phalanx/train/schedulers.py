"""A learning-rate scheduler of torch's on a job's optimizer: honoured where it says all there is to say, else refused.

It sets the rates of the optimizer it was made for. A job that makes one steps it by a hook of that optimizer, once an
optimizer step under every plan; nobody else does. Where the job has a schedule of Phalanx's own as well, or a factor on
its rates, two would write the same numbers. Its state is in no checkpoint: a run with one cannot be resumed.
"""

from __future__ import annotations

import gc

import torch
from torch.optim.lr_scheduler import LRScheduler

from phalanx.config import Job, Plan, Schedule
from phalanx.errors import Problem

_HOOKED = "optimizer.register_step_post_hook(lambda *_: scheduler.step())"


def scheduler_on(optimizer: torch.optim.Optimizer) -> str:
    """The name of the scheduler of torch's that was made for ``optimizer``; empty where there is none."""
    if not getattr(optimizer.step, "_wrapped_by_lr_sched", False):
        return ""
    known = (one for one in gc.get_objects() if issubclass(type(one), LRScheduler))
    return next((type(one).__name__ for one in known if one.optimizer is optimizer), "a scheduler of torch's")


def scheduler_problems(
    job: Job, plan: Plan, optimizer: torch.optim.Optimizer, *, lr_scale: float = 1.0, resumes: bool = False
) -> list[Problem]:
    """What keeps a scheduler on the optimizer, if there is one, from being honoured."""
    name = scheduler_on(optimizer)
    if not name:
        return []
    instead = 'schedule=px.Schedule(decay="cosine", warmup_steps=100) of the job, and no scheduler on the optimizer'

    def wrong(given: str, allowed: str, fix: str) -> list[Problem]:
        return [Problem(where="job.optimizer", given=f"{name} on the optimizer {given}", allowed=allowed, fix=fix)]

    if job.schedule != Schedule():
        return wrong(f"and {job.schedule}", "one of the two: both set the learning rate", instead)
    if lr_scale != 1.0:
        return wrong(f"and a factor of {lr_scale:g} on every learning rate", "one of the two", instead)
    if plan.server:
        return wrong(f"under {plan}", "plans without servers, which step the optimizer slice by slice", instead)
    if resumes:
        return wrong("of a run to resume", "runs from their first step on: its state is in no checkpoint", instead)
    if not optimizer._optimizer_step_post_hooks and not optimizer._optimizer_step_pre_hooks:
        allowed = "one that is stepped by a hook of the optimizer: there is no loop of yours that would step it"
        return wrong("that nobody steps", allowed, _HOOKED)
    return []


def scheduler_notes(optimizer: torch.optim.Optimizer) -> list[str]:
    """What is to be said of a scheduler that is honoured."""
    name = scheduler_on(optimizer)
    if not name:
        return []
    return [f"learning rates are those that {name} sets; its state is in no checkpoint, so the run cannot be resumed."]
