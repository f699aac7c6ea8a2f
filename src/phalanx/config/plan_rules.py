"""What can be wrong in a plan by itself, or with a batch, whatever the model and the machine."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from phalanx.config.fields import (
    AXES,
    STAGES,
    TEXTS,
    TRUTHS,
    UNBOUNDED,
    WORDS,
    choices,
    is_number,
    is_whole,
    plan_problem,
)
from phalanx.config.sync import apart_problems, split_by_weight, weights
from phalanx.device_kinds import is_kind
from phalanx.errors import Problem, SpecError

if TYPE_CHECKING:
    from phalanx.config.plan import Plan


_EXAMPLES = {"shares": "dp=2 shares=3,1", "compress": "dp=2 compress=int8"}


def show(value: object) -> str:
    """A value as the text of a plan has it."""
    if value == math.inf:
        return UNBOUNDED
    return str(value).lower() if isinstance(value, bool) else str(value)


def problems_of(plan: Plan) -> list[Problem]:
    """Everything that is wrong in the plan by itself."""
    found: list[Problem] = []

    def wrong(name: str, allowed: str, fix: str) -> None:
        value = getattr(plan, name)
        quoted = isinstance(value, str) and name not in (*WORDS, *TEXTS)
        found.append(plan_problem(name, f"{name}={value!r}" if quoted else f"{name}={show(value)}", allowed, fix))

    _numbers(plan, wrong)
    for name, words in choices().items():
        value = getattr(plan, name)
        if value not in words and not (name == "device" and is_kind(value)):
            near = difflib.get_close_matches(str(value), words, n=1, cutoff=0.7 * (name == "device"))
            wrong(name, ", ".join(words), f"{name}={near[0] if near else words[0]}")
    for name in TRUTHS:
        if not isinstance(getattr(plan, name), bool):
            wrong(name, "true or false", f"{name}=true")
    for name in TEXTS:
        if not isinstance(getattr(plan, name), str):
            wrong(name, "a text", _EXAMPLES[name])
    if not is_whole(plan.zero, 0) or plan.zero > 3:
        wrong("zero", "1, 2 or 3", "fsdp=2 zero=3")
    if found:
        return found

    if plan.zero and plan.fsdp == 1:
        allowed = "only together with fsdp=2 or more: zero says what fsdp shards"
        wrong("zero", allowed, _sharded(plan))
    if plan.zero == 0 and plan.fsdp > 1:
        wrong("zero", "1, 2 or 3 with fsdp; ranks that each hold everything are dp", f"dp={plan.dp * plan.fsdp}")
    if plan.threads > 1 and plan.world_size > 1:
        wrong("threads", "threads alone: it is the one-process way; with dp or fsdp leave it out", f"dp={plan.threads}")
    found += [*_misplaced(plan), *apart_problems(plan)]
    if plan.offload == "parameters" and plan.zero != 3:
        allowed = "parameters only with zero=3, which is what gathers them when needed"
        wrong("offload", allowed, f"fsdp={max(2, plan.fsdp, plan.dp)} zero=3 offload=parameters")
    return found


def _sharded(plan: Plan) -> str:
    """The plan with ``fsdp`` in place of ``dp``, for its ``zero``; with its other keys where they go with that."""
    fsdp = max(2, plan.dp)
    try:
        near = replace(plan, dp=1, fsdp=fsdp)
    except SpecError:
        return f"fsdp={fsdp} zero={plan.zero}"
    if any(stage_problems(near)):
        return f"fsdp={fsdp} zero={plan.zero}"
    return f"{near} zero=3" if near.zero == 3 else str(near)  # which goes without saying in a plan's text


def _numbers(plan: Plan, wrong: Callable[[str, str, str], None]) -> None:
    """Tell ``wrong`` of every key that is not a number of its kind."""
    for name in (*AXES, "threads", "stages"):
        if not is_whole(getattr(plan, name), 1):
            wrong(name, "a whole number, 1 or more", f"{name}=2")
    if plan.micro is not None and not is_whole(plan.micro, 1):
        wrong("micro", "a whole number of samples, 1 or more", "micro=8")
    if not is_whole(plan.every, 1):
        wrong("every", "a whole number of steps, 1 or more", "dp=2 sync=local every=32")
    if not is_whole(plan.server, 0):
        wrong("server", "a whole number of servers, 0 or more", "server=1 dp=4")
    if plan.staleness not in (None, math.inf) and not is_whole(plan.staleness, 0):
        allowed = "a whole number of updates, 0 or more, or unbounded"
        wrong("staleness", allowed, "server=1 dp=4 staleness=4")
    if not is_whole(plan.after, 0):
        wrong("after", "a whole number of steps, 0 or more", "dp=2 sync=local every=32 after=1000")
    if not is_whole(plan.backup, 0):
        wrong("backup", "a whole number of workers, 0 or more", "server=1 dp=4 backup=1")
    if not (is_number(plan.outer_lr) and plan.outer_lr > 0):
        wrong("outer_lr", "a number above 0", "dp=2 sync=diloco every=100 outer_lr=0.7")
    if not (is_number(plan.outer_momentum) and 0 <= plan.outer_momentum < 1):
        wrong("outer_momentum", "a number, 0 or more and below 1", "dp=2 sync=diloco every=100 outer_momentum=0.9")


def _misplaced(plan: Plan) -> Iterator[Problem]:
    """Keys that say how a dimension of the mesh works, where the plan has no such dimension."""
    default = {field.name: field.default for field in fields(plan)}
    for name, axis in {"schedule": "pp", "sequence": "tp", "attention": "cp"}.items():
        value = getattr(plan, name)
        if value != default[name] and getattr(plan, axis) == 1:
            given = f"{name}={show(value)}"
            yield plan_problem(
                name, f"{given} without {axis}", f"only together with {axis}=2 or more", f"{axis}=2 {given}"
            )
    if plan.stages != STAGES[plan.schedule] and (plan.pp == 1 or plan.schedule != "interleaved"):
        given = f"stages={plan.stages} with schedule={plan.schedule}"
        allowed = f"{STAGES[plan.schedule]}; only schedule=interleaved takes any number"
        fix = f"pp={max(2, plan.pp)} schedule=interleaved stages={max(2, plan.stages)}"
        yield plan_problem("stages", given, allowed, fix)
    if plan.threads > 1 and plan.splits_model:
        given = f"threads={plan.threads} with a model split over ranks"
        yield plan_problem("threads", given, "threads alone: it is the one-process way", f"dp={plan.threads}")
    if plan.sequence and plan.cp > 1:
        given, allowed = f"sequence=true with cp={plan.cp}", "one of the two: both share out the tokens"
        yield plan_problem("sequence", given, allowed, f"tp={plan.tp} cp={plan.cp}")


def batch_problems(plan: Plan, batch: int) -> Iterator[Problem]:
    """More replicas than samples in the global ``batch``."""
    if batch < plan.replicas:
        yield Problem(
            where="plan",
            given=f"{plan.replicas} replicas for a global batch of {batch}",
            allowed=f"at most {batch} replicas: each needs a sample in every full batch",
            fix=f"dp={batch}" if batch > 1 else "single",
        )


def share_problems(plan: Plan, batch: int) -> Iterator[Problem]:
    """Weights that give a rank of ``dp`` too few samples of the global ``batch``: each of its ranks needs one."""
    each, inner = weights(plan.shares), plan.fsdp * plan.ep
    if not each or batch < plan.replicas or min(split_by_weight(batch, each)) >= inner:
        return
    counts = ",".join(map(str, split_by_weight(batch, each)))
    given = f"shares={plan.shares}, which deals a global batch of {batch} out as {counts}"
    allowed = f"{inner} samples or more for each rank of dp" if inner > 1 else "a sample or more for each rank of dp"
    yield plan_problem("shares", given, allowed, str(replace(plan, shares="auto")))


def stage_problems(plan: Plan) -> Iterator[Problem]:
    """What keeps a pipeline from running whatever the model: ``zero=2``.

    Stages run backward at different times, so that no moment has all gradients.
    """
    if plan.pp > 1 and plan.zero == 2:
        allowed = "zero=1 or zero=3 in a pipeline: gradients of several micro-batches are under way at once"
        yield plan_problem("zero", f"zero=2 with pp={plan.pp}", allowed, str(replace(plan, zero=1)))
