"""Problems of a plan with a work on a cluster, before any device is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import gcd

from phalanx.config import Cluster, Plan
from phalanx.config.fields import plan_problem
from phalanx.config.plan_rules import batch_problems, share_problems, stage_problems
from phalanx.config.sync import AUTO, weights
from phalanx.device_kinds import kind_of_hardware
from phalanx.errors import Problem, RefusedError
from phalanx.forecast import Work
from phalanx.placement.limits import Limits
from phalanx.planner.question import Question, mixed, resized


def refuse(plan: Plan, work: Work, cluster: Cluster) -> None:
    """Raise the problems of ``plan`` with ``work`` on ``cluster``.

    Raises:
        RefusedError: with every problem found.
    """
    found = problems(plan, work, cluster)
    if found:
        raise RefusedError(found)


def problems(plan: Plan, work: Work, cluster: Cluster) -> list[Problem]:
    """Return every reason why ``plan`` cannot serve ``work`` on ``cluster``; empty if it can."""
    least = min((work.batch, *work.smaller))
    return [
        *_devices(plan, cluster),
        *batch_problems(plan, least),
        *(problem for batch in (work.batch, *work.smaller) for problem in share_problems(plan, batch)),
        *stage_problems(plan),
        *limits_of(work).problems(plan),
        *_nodes(plan, cluster),
        *_precision(plan, cluster),
        *_device(plan, cluster),
    ]


def refusals(plan: Plan, question: Question) -> list[Problem]:
    """Return the problems like ``problems``, from the question's job if it can be traced, else from its work."""
    if question.look is None:
        return problems(plan, question.work, question.cluster)
    return refusals_by_look(plan, question.cluster, question.look)


def refusals_by_look(plan: Plan, cluster: Cluster, look: Callable[[Plan], list[Problem]]) -> list[Problem]:
    """Return the problems of ``plan`` with ``cluster``; without any, those that ``look`` finds with the job."""
    there = [*_devices(plan, cluster), *_nodes(plan, cluster), *_precision(plan, cluster), *_device(plan, cluster)]
    return there or look(plan)


def crosses(plan: Plan, cluster: Cluster) -> bool:
    """Return True if ranks that split one model or shard one state would be on different devices."""
    inner = plan.tp * plan.cp * plan.ep * plan.fsdp
    return mixed(cluster) and any(group.devices % inner for group in cluster.groups)


def _devices(plan: Plan, cluster: Cluster) -> Iterator[Problem]:
    if plan.devices == cluster.devices:
        return
    there = resized(cluster, plan.devices)
    fix = f'cluster="{there}"' if there and not mixed(cluster) else f'plan="dp={cluster.devices}{_by_speed(cluster)}"'
    if cluster.devices % plan.devices == 0 and plan.threads == 1 and not weights(plan.shares):
        fix = f'plan="{replace(plan, dp=plan.dp * (cluster.devices // plan.devices))}"'
    yield Problem(
        where="plan",
        given=f"{plan}, which is for {plan.devices} devices, on {cluster}, which has {cluster.devices}",
        allowed="a mesh that multiplies to the devices: pp × dp × fsdp × ep × cp × tp = devices",
        fix=fix,
    )


def _by_speed(cluster: Cluster) -> str:
    return f" shares={AUTO}" if mixed(cluster) else ""


def _nodes(plan: Plan, cluster: Cluster) -> Iterator[Problem]:
    if plan.devices != cluster.devices or not crosses(plan, cluster):
        return
    whole = gcd(*(group.devices for group in cluster.groups))
    replicas = f"dp={cluster.devices} shares={AUTO}"
    able = f"dp={cluster.devices // whole} fsdp={whole} shares={AUTO}" if whole > 1 else replicas
    named = " or ".join(dict.fromkeys((able, replicas)))
    yield Problem(
        where="plan",
        given=f"{plan} on {cluster}: ranks that share one model or its state would be unlike devices",
        allowed=f"{named}, which give each kind samples by its speed; or any plan whose tp × cp × ep × fsdp divides "
        f"{whole}, with even shares at the pace of the slowest: only dp and pp may join unlike devices",
        fix=f'plan="{able}"',
    )


def _device(plan: Plan, cluster: Cluster) -> Iterator[Problem]:
    for group in cluster.groups:
        if plan.device not in ("auto", kind_of_hardware(group.device.kind).name):
            given = f"device={plan.device} on {group.device.name}, which is of kind {group.device.kind}"
            yield plan_problem("device", given, "auto, or the kind of the cluster's devices", "device=auto")


def _precision(plan: Plan, cluster: Cluster) -> Iterator[Problem]:
    for group in cluster.groups:
        if plan.precision not in group.device.peak:
            have = [name for name in ("bf16", "fp16", "fp32") if name in group.device.peak]
            given, fix = (
                f"precision={plan.precision} on {group.device.name}",
                f"precision={have[0] if have else 'fp32'}",
            )
            yield plan_problem("precision", given, ", ".join(have), fix)


def limits_of(work: Work) -> Limits:
    """Return the limits of ``work``."""
    profile = work.profile
    inside = [one for part in profile.parts if part.role == "block" for one in part.weights]
    return Limits(
        batch=work.batch,
        tokens=work.tokens,
        blocks=profile.blocks,
        ends=sum(part.count for part in profile.parts if part.role != "block"),
        heads=profile.heads,
        experts=profile.experts,
        products=any(one.share == "inner" and not one.expert for one in inside),
    )
