"""What keeps a plan from a batch or from itself, whatever the model and the machine. No process, no torch."""

from __future__ import annotations

from dataclasses import replace

from phalanx.errors import Problem
from phalanx.spec.plan import Plan
from phalanx.spec.shares import dealt, weights


def batch_problems(plan: Plan, batch: int) -> list[Problem]:
    """More replicas than samples in the global ``batch``."""
    if batch >= plan.replicas:
        return []
    return [
        Problem(
            where="plan",
            given=f"{plan.replicas} replicas for a global batch of {batch}",
            allowed=f"at most {batch} replicas: each needs a sample in every full batch",
            fix=f"dp={batch}" if batch > 1 else "single",
        )
    ]


def share_problems(plan: Plan, batch: int) -> list[Problem]:
    """Weights that give a rank of ``dp`` too few samples of the global ``batch``: each of its ranks needs one."""
    each, inner = weights(plan.shares), plan.fsdp * plan.ep
    if not each or batch < plan.replicas or min(dealt(batch, each)) >= inner:
        return []
    counts = ",".join(map(str, dealt(batch, each)))
    return [
        Problem(
            where="plan.shares",
            given=f"shares={plan.shares}, which deals a global batch of {batch} out as {counts}",
            allowed=f"{inner} samples or more for each rank of dp"
            if inner > 1
            else "a sample or more for each rank of dp",
            fix=str(replace(plan, shares="auto")),
        )
    ]


def stage_problems(plan: Plan) -> list[Problem]:
    """What keeps a pipeline from running whatever the model: ``zero=2``, and names that do not begin all stages.

    Stages run backward at different times, so that no moment has all gradients.
    """
    names, wanted = plan.split.split("/") if plan.split else [], plan.pp * plan.stages - 1
    if names and len(names) != wanted:
        return [
            Problem(
                where="plan.split",
                given=f"split={plan.split}: {len(names)} names for {wanted + 1} stages",
                allowed="the names of the modules that begin each stage but the first, in the order in which forward "
                f"calls them; {wanted} of them for {plan.pp} ranks with {plan.stages} each",
                fix="no split, for stages balanced by cost",
            )
        ]
    if plan.pp == 1 or plan.zero != 2:
        return []
    return [
        Problem(
            where="plan.zero",
            given=f"zero=2 with pp={plan.pp}",
            allowed="zero=1 or zero=3 in a pipeline: gradients of several micro-batches are under way at once",
            fix=str(replace(plan, zero=1)),
        )
    ]
