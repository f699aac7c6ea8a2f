"""A global batch that changes with the optimizer step, as it is known before the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from phalanx.config.fields import is_whole, plan_problem, steps_misfit
from phalanx.config.own_sampler import Sampler
from phalanx.config.plan_rules import batch_problems, share_problems
from phalanx.config.schedule import Schedule
from phalanx.config.sync import AUTO
from phalanx.errors import Problem

if TYPE_CHECKING:
    from phalanx.config.job import Job
    from phalanx.config.plan import Plan

BatchRamp = Mapping[int, int]
"""Optimizer step, the first of which is 0 → the global batch from that step on."""

_EXAMPLE = "batch=64, batch_ramp={0: 16, 500: 32, 1000: 64}"


def batches(job: Job) -> dict[int, int]:
    """Optimizer step → the global batch from it on; of a job without a ramp, 0 → ``job.batch``."""
    return {0: job.batch} if job.batch_ramp is None else dict(job.batch_ramp)


def smaller_batches(job: Job) -> tuple[int, ...]:
    """Global batches that some full steps have in place of ``job.batch``, the smallest first."""
    return tuple(sorted(set(batches(job).values()) - {job.batch}))


def ramp_problems(job: Job) -> list[Problem]:
    """What is wrong with ``job.batch_ramp``, and what cannot stand beside it."""
    ramp: Any = job.batch_ramp
    if ramp is None:
        return []
    wrong = _form(ramp)
    if wrong:
        given, allowed = wrong
        return [Problem(where="job.batch_ramp", given=given, allowed=allowed, fix=_EXAMPLE)]
    found: list[Problem] = []
    largest = max(ramp.values())
    if is_whole(job.batch, 1) and job.batch != largest:
        given = f"batch={job.batch} with a batch_ramp whose largest is {largest}"
        allowed = "the largest of batch_ramp as batch: plans, forecasts and evaluation are for it"
        found.append(Problem(where="job.batch", given=given, allowed=allowed, fix=f"batch={largest}"))
    return found + unlike_batch_problems(job, "batch_ramp")


def unlike_batch_problems(job: Job, field: str) -> list[Problem]:
    """What cannot stand beside ``field`` of the job, by which steps have unlike numbers of samples."""
    found: list[Problem] = []
    if isinstance(job.sampler, Sampler) and job.sampler.by_batch:
        given = f"a sampler that is called with the batch (px.buckets, by_batch=True), and {field}"
        allowed = "a sampler of (seed, epoch): an epoch may have batches of more than one size"
        found.append(Problem(where="job.sampler", given=given, allowed=allowed, fix=f"sampler=None, or {field}=None"))
    schedules = [job.schedule, *(getattr(phase, "schedule", None) for phase in job.phases)]
    if any(isinstance(one, Schedule) and one.warmup_samples for one in schedules):
        given, allowed = f"a warm-up in samples with {field}", "warmup_steps: steps have unlike numbers of samples"
        found.append(Problem(where="schedule.warmup_samples", given=given, allowed=allowed, fix="warmup_steps=100"))
    return found


def _form(given: Any) -> tuple[str, str] | None:
    """What was given in place of a ramp, and what is allowed."""
    if not isinstance(given, Mapping) or not given:
        what = "no step" if isinstance(given, Mapping) else f"a {type(given).__name__}"
        return what, "step → global batch from that step on, or None"
    ramp = cast("Mapping[Any, Any]", given)
    if wrong := steps_misfit(list(ramp), "a batch"):
        return wrong
    if bad := [step for step, batch in ramp.items() if not is_whole(batch, 1)]:
        return f"{ramp[bad[0]]!r} from step {bad[0]} on", "samples in one optimizer step: a whole number, 1 or more"
    return None


def global_batch_problems(job: Job, plan: Plan) -> Iterator[Problem]:
    """What keeps ``plan`` from giving every replica its share of each global batch that the job has."""
    yield from batch_problems(plan, job.batch)
    yield from share_problems(plan, job.batch)
    if plan.shares == AUTO and job.batch_tokens is not None:
        given = "shares=auto with batch_tokens: shares by speed are measured on full batches of one size"
        yield plan_problem("shares", given, "shares that are stated, or even ones", "no shares")
    if job.batch_ramp is None or job.batch < plan.replicas:
        return
    for step, batch in batches(job).items():
        for problem in (*batch_problems(plan, batch), *share_problems(plan, batch)) if batch < job.batch else ():
            yield replace(problem, given=f"{problem.given}, which batch_ramp has from step {step} on")
    if plan.shares == AUTO:
        given = "shares=auto with a batch_ramp: shares by speed are measured on full batches of one size"
        yield plan_problem("shares", given, "shares that are stated, or even ones", "no shares")
