"""What a plan wastes or leaves unread, said before the run: it is right, and could be faster, or shorter."""

from __future__ import annotations

from dataclasses import replace

from phalanx.config import Job, Plan
from phalanx.config.batch_rules import unread
from phalanx.data.batch_split import Lane, cuts, share
from phalanx.placement.schedules import bubble, order

_ENOUGH = 4  # micro-batches a rank, from which on at most about a fifth of the time is bubble


def advice(job: Job, plan: Plan, kind: str) -> list[str]:
    """One sentence for each setting that leaves ranks idle, or changes nothing, on devices of ``kind``."""
    found = [*_bubble(job, plan), *unread(plan, job.batch, job.tensor_parallel)]
    if plan.offload != "none" and kind == "cpu":
        found.append(f"offload={plan.offload} moves nothing: on CPU cores all of it lives in host memory.")
    return found


def _bubble(job: Job, plan: Plan) -> list[str]:
    micros = micro_batches(job, plan)
    if plan.pp == 1 or micros >= plan.pp * plan.stages:
        return []
    stages = f"{micros} micro-batch{'es' if micros > 1 else ''} for {plan.pp * plan.stages} stages"
    what = "plain model parallelism, " if micros == 1 else ""
    found = f"{what}{stages}: ranks are idle for {_idle(plan, micros):.0%} of a step"
    better = _better(job, plan)
    if better is None:
        return [f"{found}; a larger batch would allow more of them."]
    many = micro_batches(job, better)
    return [f"{found}; micro={better.micro} would make it {many} micro-batches, idle for {_idle(better, many):.0%}."]


def micro_batches(job: Job, plan: Plan) -> int:
    """Micro-batches of the largest share of a full global batch."""
    ranks = range(0, plan.world_size, plan.world_size // plan.dp) if plan.shares else (0,)
    return max(len(cuts(job.batch, Lane.of(plan, rank), plan.micro)[0]) for rank in ranks)


def _idle(plan: Plan, micros: int) -> float:
    return bubble(order(plan.schedule, plan.pp, plan.stages, micros))


def _better(job: Job, plan: Plan) -> Plan | None:
    """The plan with enough micro-batches, or as many as the batch allows; ``None`` where that are no more."""
    start, stop = share(job.batch, 0, plan.replicas)
    better = replace(plan, micro=max(1, (stop - start) // (_ENOUGH * plan.pp)))
    return better if micro_batches(job, better) > micro_batches(job, plan) else None
