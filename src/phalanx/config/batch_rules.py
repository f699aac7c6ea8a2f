"""What keeps a plan from a batch or from itself, whatever the model and the machine. No process, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from phalanx.config.plan import Plan
from phalanx.config.sync import AUTO, split_by_weight, weights
from phalanx.errors import Problem


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
    if not each or batch < plan.replicas or min(split_by_weight(batch, each)) >= inner:
        return []
    counts = ",".join(map(str, split_by_weight(batch, each)))
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


def unread(plan: Plan, batch: int, tensor_parallel: Mapping[str, object]) -> list[str]:
    """What is set and makes no difference under ``plan``, one sentence each; empty where everything does."""
    found: list[str] = []
    most = largest_share(plan, batch)
    if plan.micro is not None and plan.micro > most:
        samples = f"{most} sample{'s' if most > 1 else ''}"
        found.append(f"micro={plan.micro} splits nothing: a rank's share of the global batch of {batch} is {samples}.")
    if tensor_parallel and plan.tp == 1:
        found.append("tensor_parallel, which the job states, says how tp cuts weights; this plan has no tp.")
    return found


def largest_share(plan: Plan, batch: int) -> int:
    """Samples of a global ``batch`` that one replica has at most."""
    each, inner = weights(plan.shares), plan.replicas // plan.dp
    if plan.shares == AUTO:  # any other rank may end with as little as one sample a replica
        return max(1, -(-(batch - (plan.dp - 1) * inner) // inner))
    return -(-max(split_by_weight(batch, each)) // inner) if each else -(-batch // plan.replicas)
