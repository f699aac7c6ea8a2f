"""The limits of a model for each dimension of a plan, and plans that ``train`` does not run yet, for every verb."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.config import Cluster, Plan
from phalanx.config.fields import plan_problem
from phalanx.errors import Problem
from phalanx.placement.batch_split import largest_share

_PRECISIONS = ("fp32", "bf16", "fp16")


_CLASSES_A_RANK = 16  # below which cutting a head is not worth its three reductions
_MANY_ROWS = 1000


def most_for_classes(rows: int) -> int:
    """Return the most ranks of ``tp`` that cut a head of these classes, or a table of these words; 1: whole.

    The cuts of ``tp`` are found twice: by ``parallel.tensor`` for a plan's own ``tp``, by trying each cut on the model,
    and by ``trace.tp_shares`` once for any, from the operations of a trace, so that thousands of plans can be priced. A
    test holds the two together.
    """
    return max(1, rows // _CLASSES_A_RANK)


def is_large_table(rows: int) -> bool:
    """Return True if an embedding is cut even if no head shares its vocabulary."""
    return rows >= _MANY_ROWS


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of one model and batch."""

    batch: int  # samples in a step: the most replicas
    tokens: int  # in a sample
    blocks: int  # that repeat
    ends: int  # parts before and after them; each can be a stage of its own
    heads: int  # of keys; 0 without attention
    experts: int  # of the layer with fewest; 0 without
    products: bool  # whether any weights can be cut over ``tp``

    @property
    def attends(self) -> bool:
        """Return True if samples have tokens to share out."""
        return self.heads > 0 and self.tokens > 1

    def evenly(self, *, tp: int = 1, cp: int = 1, ep: int = 1) -> bool:
        """Return True if ranks of these dimensions get equal shares of heads, tokens and experts."""
        return (
            (tp == 1 or (self.products and self.heads % tp == 0))
            and (cp == 1 or (self.attends and self.tokens % cp == 0))
            and (ep == 1 or (self.experts > 0 and self.experts % ep == 0))
        )

    def problems(self, plan: Plan) -> Iterator[Problem]:
        if plan.tp > 1 and not self.products:
            yield no_layers_to_cut(plan)
        if plan.cp > 1 and not self.attends:
            yield no_attention("cp", plan)
        if plan.sequence and not self.attends:
            yield no_attention("sequence", plan)
        if plan.ep > max(1, self.experts):
            yield few_experts(plan, self.experts)
        most = self.blocks + self.ends
        if plan.pp > 1 and plan.pp * plan.stages > max(1, most):
            yield few_parts(plan, most)


def no_layers_to_cut(plan: Plan) -> Problem:
    """Return the problem of ``tp`` for a model without pairs of layers."""
    given = f"tp={plan.tp} for a model in which no two layers can share out their weights"
    allowed = "models with linear layers that follow one another, such as transformers"
    return plan_problem("tp", given, allowed, f"fsdp={plan.tp}")


def no_attention(key: str, plan: Plan) -> Problem:
    """Return the problem of ``cp`` or ``sequence`` for a model without attention that can be traced."""
    fix = f"tp={plan.tp}" if key == "sequence" else f"dp={plan.cp}"
    allowed = (
        "models whose repeated blocks attend over a sequence, by scaled_dot_product_attention or products of their "
        "own; what torch.nn.MultiheadAttention does inside is not followed"
    )
    return plan_problem(key, f"{key} for a model without attention over tokens", allowed, fix)


def few_experts(plan: Plan, fewest: int) -> Problem:
    """Return the problem of more ranks of ``ep`` than experts; 0 for a model without any."""
    if not fewest:
        return no_experts(plan, "a model without experts")
    fits = plan.ep % fewest == 0
    whole = replace(plan, ep=fewest, dp=plan.dp * plan.ep // fewest) if fits else _without_experts(plan)
    given = f"ep={plan.ep} for layers of {fewest} experts"
    return plan_problem("ep", given, f"at most {fewest}: a rank holds one or more", str(whole))


def no_experts(plan: Plan, what: str) -> Problem:
    """Return the problem of ``ep`` for ``what``, which cannot be distributed."""
    allowed = (
        "models with a module that holds all experts' weights in tensors (experts, ..., ...) and is called with hidden "
        "states (tokens, width), the experts chosen for each (tokens, k) and their weights (tokens, k)"
    )
    return plan_problem("ep", f"ep={plan.ep} for {what}", allowed, str(_without_experts(plan)))


def _without_experts(plan: Plan) -> Plan:
    return replace(plan, ep=1, dp=plan.dp * plan.ep)


def few_parts(plan: Plan, most: int, names: Sequence[str] = (), because: str = "") -> Problem:
    """Return the problem of more stages than the model has parts."""
    shown = f": {', '.join(names[:4])}" + (", ..." if len(names) > 4 else "") if names else ""
    given = f"{plan.pp * plan.stages} stages ({plan.pp} ranks with {plan.stages} each)"
    given += f"; some cuts are not possible: {because}" if because else ""
    allowed = f"at most {most} for this model, one for each of its parts{shown}"
    return plan_problem("pp", given, allowed, f"pp={most} schedule=1f1b" if most > 1 else "fsdp=2")


def reads_uncalled(plan: Plan, name: str) -> Problem:
    """Return the problem of ``recompute`` in a pipeline for the block ``name``, which reads other tensors."""
    reads = f"{name}, which reads tensors that it is not called with"
    given, fix = f"recompute={plan.recompute} in a pipeline for {reads}", str(replace(plan, recompute="none"))
    return plan_problem("recompute", given, "blocks that get all they compute with as arguments", fix)


def not_run_yet(plan: Plan, cluster: Cluster) -> str:
    """Return the reason why ``train`` does not run ``plan`` on ``cluster``'s kind of devices yet, or ""."""
    if plan.precision not in _PRECISIONS:
        return f"precision={plan.precision} can be forecast but not run yet"
    if len({group.device.kind for group in cluster.groups}) > 1:
        return "devices of several kinds in one run"
    return ""


def unread(plan: Plan, batch: int, tensor_parallel: Mapping[str, object]) -> list[str]:
    """Return a sentence for each setting without effect under ``plan``."""
    found: list[str] = []
    most = largest_share(plan, batch)
    if plan.micro is not None and plan.micro > most:
        samples = f"{most} sample{'s' if most > 1 else ''}"
        found.append(f"micro={plan.micro} splits nothing: a rank's share of the global batch of {batch} is {samples}.")
    if tensor_parallel and plan.tp == 1:
        found.append("tensor_parallel, which the job states, says how tp cuts weights; this plan has no tp.")
    return found


def returns_freed_memory(fsdp: Any) -> Any:
    """Return True if a CPU's freed memory goes back to the kernel: sharding would otherwise leave holes."""
    return fsdp > 1
