"""What keeps a plan from a work on a cluster, before any device is there: one problem for each reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd

from phalanx.errors import Problem, RefusedError
from phalanx.forecast import Work
from phalanx.planner.clusters import mixed, resized
from phalanx.planner.limits import Limits
from phalanx.spec import Cluster, Plan
from phalanx.spec.rules import batch_problems, share_problems, stage_problems
from phalanx.spec.shares import AUTO, weights


def refuse(plan: Plan, work: Work, cluster: Cluster) -> None:
    """Raise what keeps ``plan`` from serving ``work`` on ``cluster``.

    Raises:
        RefusedError: with every problem found.
    """
    found = problems(plan, work, cluster)
    if found:
        raise RefusedError(found)


def problems(plan: Plan, work: Work, cluster: Cluster) -> list[Problem]:
    """Every reason why ``plan`` cannot serve ``work`` on ``cluster``; empty if it can."""
    return [
        *_devices(plan, cluster),
        *batch_problems(plan, work.batch),
        *share_problems(plan, work.batch),
        *stage_problems(plan),
        *_model(plan, Limits.of(work)),
        *_nodes(plan, cluster),
        *_precision(plan, cluster),
    ]


def crosses(plan: Plan, cluster: Cluster) -> bool:
    """Whether ranks that split one model or shard one state would be unlike devices."""
    inner = plan.tp * plan.cp * plan.ep * plan.fsdp
    return mixed(cluster) and any(group.devices % inner for group in cluster.groups)


def _devices(plan: Plan, cluster: Cluster) -> Iterator[Problem]:
    if plan.devices == cluster.devices:
        return
    there = resized(cluster, plan.devices)
    fix = f"--on {there}" if there and not mixed(cluster) else f'--plan "dp={cluster.devices}{_by_speed(cluster)}"'
    if cluster.devices % plan.devices == 0 and plan.threads == 1 and not weights(plan.shares):
        fix = f'--plan "{replace(plan, dp=plan.dp * (cluster.devices // plan.devices))}"'
    yield Problem(
        where="plan",
        given=f"{plan}, which is for {plan.devices} devices, on {cluster}, which has {cluster.devices}",
        allowed="a mesh that multiplies to the devices: pp × dp × fsdp × ep × cp × tp = devices",
        fix=fix,
    )


def _by_speed(cluster: Cluster) -> str:
    return f" shares={AUTO}" if mixed(cluster) else ""


def _model(plan: Plan, limits: Limits) -> Iterator[Problem]:
    if not limits.tp(plan.tp):
        allowed = f"a divisor of the {limits.heads} heads of keys" if limits.products else "1: no layers to cut"
        yield _of("tp", plan, allowed, gcd(plan.tp, limits.heads) if limits.products else 1)
    if not limits.cp(plan.cp):
        allowed = f"a divisor of the {limits.tokens} tokens" if limits.attends else "1: no attention over tokens"
        yield _of("cp", plan, allowed, gcd(plan.cp, limits.tokens) if limits.attends else 1)
    if not limits.ep(plan.ep):
        allowed = f"a divisor of the {limits.experts} experts" if limits.experts else "1: the model has no experts"
        yield _of("ep", plan, allowed, gcd(plan.ep, limits.experts) if limits.experts else 1)
    if not limits.pp(plan.pp * plan.stages) and plan.pp > 1:
        yield Problem(
            where="plan.pp",
            given=f"{plan.pp * plan.stages} stages ({plan.pp} ranks with {plan.stages} each)",
            allowed=f"at most {limits.blocks}, one for each block of the model",
            fix=str(Plan(pp=limits.blocks)) if limits.blocks > 1 else "fsdp=2",
        )


def _of(key: str, plan: Plan, allowed: str, ranks: int) -> Problem:
    given = getattr(plan, key)
    return Problem(where=f"plan.{key}", given=f"{key}={given}", allowed=allowed, fix=f"{key}={max(1, ranks)}")


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
        fix=f'--plan "{able}"',
    )


def _precision(plan: Plan, cluster: Cluster) -> Iterator[Problem]:
    for group in cluster.groups:
        if plan.precision not in group.device.peak:
            have = [name for name in ("bf16", "fp16", "fp32") if name in group.device.peak]
            yield Problem(
                where="plan.precision",
                given=f"precision={plan.precision} on {group.device.name}",
                allowed=", ".join(have),
                fix=f"precision={have[0] if have else 'fp32'}",
            )
