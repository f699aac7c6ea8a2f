"""Plans that differ from another in one thing: a dimension of the mesh halved for another, or one key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

from phalanx.errors import SpecError
from phalanx.planner.question import Question
from phalanx.planner.rules import problems
from phalanx.spec import Plan
from phalanx.spec.plan import Recompute
from phalanx.spec.shares import AUTO

_MESH = ("dp", "fsdp", "tp", "pp", "cp", "ep")


def neighbours(plan: Plan, question: Question) -> Iterator[tuple[str, Plan]]:
    """What is changed, in words, and the plan with it: those that could run, whether they fit or not."""
    seen = {plan}
    for told, changes in _changes(plan, question):
        try:
            other = _tidy(plan, changes)
        except SpecError:
            continue
        node = min(group.per_node for group in question.cluster.groups)
        if other in seen or node % other.tp or problems(other, question.work, question.cluster):
            continue
        seen.add(other)
        yield told, other


def _changes(plan: Plan, question: Question) -> Iterator[tuple[str, dict[str, Any]]]:
    for source in _MESH:
        size = getattr(plan, source)
        factor = next((one for one in range(2, size + 1) if size % one == 0), 0)
        for target in _MESH:
            if factor and target != source:
                more, less = getattr(plan, target) * factor, size // factor
                yield f"{target}={more} {source}={less}", {source: less, target: more}
    yield from ((f"zero={zero}", {"zero": zero}) for zero in (1, 2, 3) if plan.fsdp > 1)
    share = -(-question.work.batch // plan.replicas)
    micro = plan.micro or share
    yield from ((f"micro={one}", {"micro": one}) for one in (micro * 2, micro // 2) if 1 <= one <= share)
    yield from ((f"recompute={one}", {"recompute": one}) for one in get_args(Recompute))
    if plan.pp > 1:
        for schedule in ("1f1b", "interleaved", "zero-bubble", "zbv"):
            yield f"schedule={schedule}", {"schedule": schedule, "stages": None}
    if plan.shares:
        yield "even shares", {"shares": ""}
    elif question.mixed:
        yield f"shares={AUTO}", {"shares": AUTO}
    if plan.tp > 1:
        yield f"sequence={str(not plan.sequence).lower()}", {"sequence": not plan.sequence}


def _tidy(plan: Plan, changes: dict[str, Any]) -> Plan:
    """``plan`` with ``changes``; what a dimension that is gone needed is gone with it."""
    given = {name: changes.get(name, getattr(plan, name)) for name in _MESH}
    if given["fsdp"] == 1:
        changes = {**changes, "zero": 0}
    elif plan.fsdp == 1 and "zero" not in changes:
        changes = {**changes, "zero": 1}
    if given["pp"] == 1:
        changes = {**changes, "schedule": "1f1b", "stages": None, "split": ""}
    elif plan.pp > 1 and changes.get("zero", plan.zero) == 2:
        changes = {**changes, "zero": 1}
    if given["tp"] == 1 or given["cp"] > 1:
        changes = {**changes, "sequence": False}
    if given["dp"] == 1 or given["pp"] > 1:
        changes = {**changes, "shares": ""}
    if given["cp"] == 1:
        changes = {**changes, "attention": "ring"}
    return replace(plan, **changes)
