"""Everything that can be wrong in a plan by itself, without a job or a machine."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

from phalanx.errors import Problem
from phalanx.spec.fields import is_whole
from phalanx.spec.keys import AXES, CHOICES, STAGES, TEXTS, TRUTHS
from phalanx.spec.shares import weights

if TYPE_CHECKING:
    from phalanx.spec.plan import Plan


def show(value: object) -> str:
    """A value as the text of a plan has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def problems_of(plan: Plan) -> list[Problem]:
    """Everything that is wrong in the plan by itself, without a job or a machine."""
    found: list[Problem] = []

    def wrong(name: str, allowed: str, fix: str) -> None:
        found.append(
            Problem(where=f"plan.{name}", given=f"{name}={show(getattr(plan, name))}", allowed=allowed, fix=fix)
        )

    for name in (*AXES, "threads", "stages"):
        if not is_whole(getattr(plan, name), 1):
            wrong(name, "a whole number, 1 or more", f"{name}=2")
    if plan.micro is not None and not is_whole(plan.micro, 1):
        wrong("micro", "a whole number of samples, 1 or more", "micro=8")
    if not is_whole(plan.every, 1):
        wrong("every", "a whole number of steps, 1 or more", "dp=2 sync=local every=32")
    if not is_whole(plan.server, 0):
        wrong("server", "a whole number of servers, 0 or more", "server=1 dp=4")
    if plan.staleness is not None and not is_whole(plan.staleness, 0):
        wrong("staleness", "a whole number of steps, 0 or more", "server=1 dp=4 staleness=4")
    for name, choices in CHOICES.items():
        if getattr(plan, name) not in choices:
            near = difflib.get_close_matches(str(getattr(plan, name)), choices, n=1, cutoff=0.0)
            wrong(name, ", ".join(choices), f"{name}={near[0] if near else choices[0]}")
    for name in TRUTHS:
        if not isinstance(getattr(plan, name), bool):
            wrong(name, "true or false", f"{name}=true")
    for name in TEXTS:
        if not isinstance(getattr(plan, name), str):
            wrong(name, "a text", "dp=2 shares=3,1" if name == "shares" else f'{name}=""')
    if not is_whole(plan.zero, 0) or plan.zero > 3:
        wrong("zero", "1, 2 or 3", "fsdp=2 zero=3")
    if found:
        return found

    if plan.zero and plan.fsdp == 1:
        wrong(
            "zero",
            "only together with fsdp=2 or more: zero says what fsdp shards",
            f"fsdp={max(2, plan.dp)} zero={plan.zero}",
        )
    if plan.zero == 0 and plan.fsdp > 1:
        wrong("zero", "1, 2 or 3 with fsdp; ranks that each hold everything are dp", f"dp={plan.dp * plan.fsdp}")
    if plan.threads > 1 and plan.world_size > 1:
        wrong("threads", "threads alone: it is the one-process way; with dp or fsdp leave it out", f"dp={plan.threads}")
    found += _misplaced(plan) + _apart(plan) + _shares(plan)
    if plan.offload == "parameters" and plan.zero != 3:
        wrong(
            "offload",
            "parameters only with zero=3, which is what gathers them when needed",
            f"fsdp={max(2, plan.fsdp, plan.dp)} zero=3 offload=parameters",
        )
    return found


def _misplaced(plan: Plan) -> list[Problem]:
    """Keys that say how a dimension of the mesh works, where the plan has no such dimension."""
    found: list[Problem] = []
    default = {field.name: field.default for field in fields(plan)}
    needs = {"schedule": "pp", "split": "pp", "sequence": "tp", "attention": "cp"}
    for name, axis in needs.items():
        value = getattr(plan, name)
        if value != default[name] and getattr(plan, axis) == 1:
            given = f"{name}={show(value)} without {axis}"
            found.append(
                Problem(
                    where=f"plan.{name}",
                    given=given,
                    allowed=f"only together with {axis}=2 or more",
                    fix=f"{axis}=2 {name}={show(value)}",
                )
            )
    if plan.stages != STAGES[plan.schedule] and (plan.pp == 1 or plan.schedule != "interleaved"):
        found.append(
            Problem(
                where="plan.stages",
                given=f"stages={plan.stages} with schedule={plan.schedule}",
                allowed=f"{STAGES[plan.schedule]}; only schedule=interleaved takes any number",
                fix=f"pp={max(2, plan.pp)} schedule=interleaved stages={max(2, plan.stages)}",
            )
        )
    if plan.threads > 1 and plan.splits_model:
        found.append(
            Problem(
                where="plan.threads",
                given=f"threads={plan.threads} with a model split over ranks",
                allowed="threads alone: it is the one-process way",
                fix=f"dp={plan.threads}",
            )
        )
    if plan.sequence and plan.cp > 1:
        found.append(
            Problem(
                where="plan.sequence",
                given=f"sequence=true with cp={plan.cp}",
                allowed="one of the two: both share out the tokens",
                fix=f"tp={plan.tp} cp={plan.cp}",
            )
        )
    return found


def _apart(plan: Plan) -> list[Problem]:
    """What ``sync`` and ``server`` need, and what they exclude."""
    found: list[Problem] = []

    def wrong(name: str, given: str, allowed: str, fix: str) -> None:
        found.append(Problem(where=f"plan.{name}", given=given, allowed=allowed, fix=fix))

    dp, apart = max(2, plan.dp), plan.sync != "each"
    if plan.every > 1 and not apart:
        allowed = "only with sync=local or sync=diloco: otherwise replicas are brought together in every step"
        wrong("every", f"every={plan.every} with sync=each", allowed, f"dp={dp} sync=local every={plan.every}")
    if (plan.outer != "none") != (plan.sync == "diloco"):
        allowed = "nesterov or sgd with sync=diloco, and nothing without: it steps what replicas have learnt"
        outer = plan.outer if plan.outer != "none" else "nesterov"
        wrong("outer", f"outer={plan.outer} with sync={plan.sync}", allowed, f"dp={dp} sync=diloco outer={outer}")
    if apart and plan.dp == 1:
        allowed = "only together with dp=2 or more: it says how replicas are brought together"
        wrong("sync", f"sync={plan.sync} without dp", allowed, f"dp=2 sync={plan.sync} every={max(2, plan.every)}")
    if plan.staleness is not None and not plan.server:
        allowed = "only together with server=1 or more: workers may be so many steps ahead of each other"
        wrong("staleness", f"staleness={plan.staleness} without server", allowed, f"server=1 {_pair(plan)}")
    if plan.server and apart:
        allowed = "one of the two: both say how replicas are brought together"
        wrong("server", f"server={plan.server} with sync={plan.sync}", allowed, f"server={plan.server} dp={dp}")
    if plan.server:
        found += _beside_servers(plan)
    return found


def _pair(plan: Plan) -> str:
    return f"dp={max(2, plan.dp)} staleness={plan.staleness}"


def _beside_servers(plan: Plan) -> Iterator[Problem]:
    """Workers of servers hold a whole model and no optimizer."""
    split = [f"{name}={getattr(plan, name)}" for name in (*AXES, "threads") if name != "dp" and getattr(plan, name) > 1]
    fix = f"server={plan.server} dp={max(2, plan.replicas)}"
    if split:
        given = f"server={plan.server} with {' '.join(split)}"
        yield Problem(where="plan.server", given=given, allowed="dp alone: each worker holds a whole model", fix=fix)
    if plan.offload != "none":
        given = f"offload={plan.offload} with server={plan.server}"
        yield Problem(where="plan.offload", given=given, allowed="none: servers hold the optimizer", fix=fix)


def _shares(plan: Plan) -> list[Problem]:
    """Weights that cannot be read, that are not one for each rank of ``dp``, or that give one nothing."""
    try:
        each = weights(plan.shares)
    except ValueError:
        allowed = "auto, or a whole number for each rank of dp, joined by commas"
        return [Problem(where="plan.shares", given=f"shares={plan.shares}", allowed=allowed, fix="dp=2 shares=3,1")]
    if not plan.shares:
        return []
    fix = f"dp={max(2, plan.dp)} shares=auto"
    if plan.dp == 1:
        allowed = "only together with dp=2 or more: they are shares of its ranks"
        return [Problem(where="plan.shares", given=f"shares={plan.shares} without dp", allowed=allowed, fix=fix)]
    if plan.pp > 1:
        given, allowed = f"shares={plan.shares} with pp={plan.pp}", "no pipeline: ranks of dp that are whole replicas"
        return [Problem(where="plan.shares", given=given, allowed=allowed, fix=fix)]
    if each and (len(each) != plan.dp or not all(each)):
        given = f"shares={plan.shares} with dp={plan.dp}"
        allowed = f"{plan.dp} weights, one for each rank of dp, 1 or more each"
        return [Problem(where="plan.shares", given=given, allowed=allowed, fix=fix)]
    return []
