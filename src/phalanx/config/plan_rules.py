"""Rules of a plan: the combinations of keys that are refused, alone and with a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from phalanx.config.fields import AXES, STAGES, Veto, needs, plan_problem
from phalanx.config.sync import Compression, split_by_weight, weights
from phalanx.errors import Problem

if TYPE_CHECKING:
    from phalanx.config.plan import Plan


def _over_one(plan: Any, *more: str) -> str:
    names = [name for name in (*AXES, *more) if name != "dp" and getattr(plan, name) > 1]
    return " ".join(f"{name}={getattr(plan, name)}" for name in names)


def _codec(plan: Any) -> str:
    return Compression.parse(plan.compress).codec


def _uneven(plan: Any) -> bool:
    each = weights(plan.shares)
    return bool(each) and plan.dp > 1 and plan.pp == 1 and (len(each) != plan.dp or not all(each))


PLAN_RULES = (
    needs("zero", "fsdp", "zero says what fsdp shards", 0),
    Veto(
        "zero",
        lambda p: p.zero == 0 and p.fsdp > 1,
        "zero=0",
        "1, 2 or 3 with fsdp; for whole replicas use dp",
        lambda p: f"dp={p.dp * p.fsdp}",
    ),
    Veto(
        "threads",
        lambda p: p.threads > 1 and p.world_size > 1,
        "threads={threads} with more than one rank",
        "threads alone: all replicas run in one process",
        "dp={threads}",
    ),
    needs("schedule", "pp", "it orders the micro-batches of a pipeline", "1f1b"),
    needs("sequence", "tp", "ranks of tp share out the tokens", False),
    needs("attention", "cp", "ranks of cp share out the tokens", "ring"),
    Veto(
        "stages",
        lambda p: p.stages != STAGES[p.schedule] and (p.pp == 1 or p.schedule != "interleaved"),
        "stages={stages} with schedule={schedule}",
        lambda p: f"{STAGES[p.schedule]}; only schedule=interleaved takes any number",
        "pp={pp2} schedule=interleaved stages={stages2}",
    ),
    Veto(
        "sequence",
        lambda p: p.sequence and p.cp > 1,
        "sequence=true with cp={cp}",
        "one of the two: both share out the tokens",
        "tp={tp} cp={cp}",
    ),
    Veto(
        "every",
        lambda p: p.every != 1 and p.sync == "each",
        "every={every} with sync=each",
        "only with sync=local or sync=diloco",
        "dp={dp2} sync=local every={every}",
    ),
    Veto(
        "after",
        lambda p: p.after and not p.staleness and p.sync == "each",
        "after={after} with sync=each",
        "only with sync=local, sync=diloco or staleness",
        "dp={dp2} sync=local every=32 after={after}",
    ),
    Veto(
        "outer",
        lambda p: (p.outer != "none") != (p.sync == "diloco"),
        "outer={outer} with sync={sync}",
        "nesterov or sgd with sync=diloco, else none",
        lambda p: f"dp={max(2, p.dp)} sync=diloco outer={p.outer.replace('none', 'nesterov')}",
    ),
    Veto(
        "outer_lr",
        lambda p: p.outer == "none" and p.outer_lr != 1,
        "outer_lr={outer_lr} with outer=none",
        "only with sync=diloco",
        "dp={dp2} sync=diloco",
    ),
    Veto(
        "outer_momentum",
        lambda p: p.outer != "nesterov" and p.outer_momentum != 0,
        "outer_momentum={outer_momentum} with outer={outer}",
        "only with sync=diloco outer=nesterov",
        "dp={dp2} sync=diloco",
    ),
    needs("sync", "dp", "it says how replicas are synchronised", "each"),
    needs("staleness", "server", "only servers take late gradients", None),
    Veto(
        "backup",
        lambda p: p.backup and not p.server,
        "backup={backup} without server",
        "only together with server=1 or more: servers leave out the slowest workers",
        "server=1 dp={dp2} backup=1",
    ),
    Veto(
        "server",
        lambda p: p.server and p.sync != "each",
        "server={server} with sync={sync}",
        "one of the two: both synchronise replicas",
        "server={server} dp={dp2}",
    ),
    Veto(
        "shares",
        lambda p: p.server and p.shares,
        "shares={shares} with server={server}",
        "one of the two: servers give samples to the next free worker",
        "server={server} dp={dp2}",
    ),
    Veto(
        "backup",
        lambda p: p.backup and p.staleness,
        "backup={backup} with staleness={staleness}",
        "one of the two: with staleness no step waits",
        lambda p: f"server={p.server} dp={max(2, p.dp, p.backup + 1)} backup={p.backup}",
    ),
    Veto(
        "backup",
        lambda p: p.server and not (p.backup and p.staleness) and p.backup >= p.dp,
        "backup={backup} with dp={dp}",
        "fewer than the workers",
        lambda p: f"server={p.server} dp={p.backup + 1} backup=1",
    ),
    Veto(
        "server",
        lambda p: p.server and _over_one(p, "threads"),
        lambda p: f"server={p.server} with {_over_one(p, 'threads')}",
        "dp alone: each worker holds a whole model",
        lambda p: f"server={p.server} dp={max(2, p.replicas)}",
    ),
    Veto(
        "offload",
        lambda p: p.server and p.offload != "none",
        "offload={offload} with server={server}",
        "none: servers hold the optimizer",
        "server={server} dp={dp2}",
    ),
    needs("compress", "dp", "it is how replicas send gradients", "none"),
    Veto(
        "compress",
        lambda p: _codec(p) != "none" and p.sync == "each" and not p.server and _over_one(p),
        lambda p: f"compress={p.compress} with {_over_one(p)}",
        "dp alone, or sync=local or sync=diloco",
        "dp={dp2} compress={compress}",
    ),
    Veto(
        "compress",
        lambda p: _codec(p) == "powersgd" and p.server,
        "compress={compress} with server={server}",
        "fp16, bf16, int8 or topk with servers",
        "server={server} dp={dp2} compress=int8",
    ),
    Veto(
        "compress",
        lambda p: _codec(p) == "powersgd" and p.sync != "each",
        "compress={compress} with sync={sync}",
        "fp16, bf16, int8 or topk unless sync=each",
        "sync={sync} dp={dp2} compress=int8",
    ),
    Veto(
        "shares",
        lambda p: p.shares and p.dp == 1,
        "shares={shares} without dp",
        "only together with dp=2 or more: they are shares of its ranks",
        "dp=2 shares=auto",
    ),
    Veto(
        "shares",
        lambda p: p.shares and p.dp > 1 and p.pp > 1,
        "shares={shares} with pp={pp}",
        "no pipeline: ranks of dp that are whole replicas",
        "dp={dp2} shares=auto",
    ),
    Veto(
        "shares",
        _uneven,
        "shares={shares} with dp={dp}",
        "{dp} weights, one for each rank of dp, 1 or more each",
        "dp={dp2} shares=auto",
    ),
    Veto(
        "offload",
        lambda p: p.offload == "parameters" and p.zero != 3,
        "offload=parameters with zero={zero}",
        "parameters only with zero=3, which gathers them when needed",
        lambda p: f"fsdp={max(2, p.fsdp, p.dp)} zero=3 offload=parameters",
    ),
)


def batch_problems(plan: Plan, batch: int) -> Iterator[Problem]:
    """Yield the problem of more replicas than samples in the global ``batch``."""
    if batch < plan.replicas:
        yield Problem(
            where="plan",
            given=f"{plan.replicas} replicas for a global batch of {batch}",
            allowed=f"at most {batch} replicas: each needs a sample in every full batch",
            fix=f"dp={batch}" if batch > 1 else "single",
        )


def share_problems(plan: Plan, batch: int) -> Iterator[Problem]:
    """Yield the problem of weights that leave a rank of ``dp`` too few samples of the global ``batch``."""
    each, inner = weights(plan.shares), plan.fsdp * plan.ep
    if not each or batch < plan.replicas or min(split_by_weight(batch, each)) >= inner:
        return
    counts = ",".join(map(str, split_by_weight(batch, each)))
    given = f"shares={plan.shares}, which deals a global batch of {batch} out as {counts}"
    allowed = f"{inner} samples or more for each rank of dp" if inner > 1 else "a sample or more for each rank of dp"
    yield plan_problem("shares", given, allowed, str(replace(plan, shares="auto")))


def stage_problems(plan: Plan) -> Iterator[Problem]:
    """Yield the problem of ``zero=2`` in a pipeline, in which no moment has all gradients."""
    if plan.pp > 1 and plan.zero == 2:
        allowed = "zero=1 or zero=3 in a pipeline: gradients of several micro-batches are under way at once"
        yield plan_problem("zero", f"zero=2 with pp={plan.pp}", allowed, str(replace(plan, zero=1)))
