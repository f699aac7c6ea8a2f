"""What keeps a plan from a loss that compares the samples of the whole global batch with each other."""

from __future__ import annotations

from dataclasses import replace

from phalanx.config import Job, Plan
from phalanx.config.fields import plan_problem
from phalanx.device_kinds import kind_named
from phalanx.errors import Problem
from phalanx.placement.batch_split import micro_batches


def check(job: Job, plan: Plan, kind: str) -> list[Problem]:
    """Plans that do not have all outputs of a step at one time, on devices of this ``kind``."""
    if job.loss_over == "samples":
        return []
    coupled = 'loss_over="batch", whose loss needs the outputs of the whole global batch'
    found: list[Problem] = []
    if plan.pp > 1:
        given = f"a pipeline for {coupled}: it begins backward before the last micro-batch's forward"
        whole = {"pp": 1, "fsdp": plan.fsdp * plan.pp, "schedule": "1f1b", "stages": 1, "split": ""}
        fix = replace(plan, **whole, zero=plan.zero if plan.fsdp > 1 else 3)  # pyrefly: ignore[bad-argument-type]
        found.append(plan_problem("pp", given, "dp, fsdp, ep, tp, cp or threads", str(fix)))
    if plan.server:
        given = f"servers for {coupled}: workers compute pieces of it one by one, each when it is free"
        found.append(plan_problem("server", given, "plans without servers", f"dp={plan.dp}"))
    elif plan.sync != "each":
        given = f"sync={plan.sync} for {coupled}: replicas step by themselves, each on its own share"
        found.append(plan_problem("sync", given, "sync=each", "sync=each"))
    if plan.threads > 1 and kind_named(kind).on_host and micro_batches(plan, job.batch) > 1:
        given = (
            f"threads and micro={plan.micro} on a CPU for {coupled}: forward then runs twice, and threads that share "
            "one stream of random numbers would not draw the same ones again"
        )
        fix = replace(plan, threads=1, dp=plan.threads)
        found.append(plan_problem("micro", given, "threads without micro, or processes", str(fix)))
    return found
