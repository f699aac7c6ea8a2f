"""What each technique has to send in one optimizer step, by the papers that describe it: bytes, over all ranks.

Sums over all ranks, because ranks differ: the first stage of a pipeline sends no gradients. Rings are counted exactly:
an all-reduce of S bytes over n ranks is 2 (n - 1) S over all of them, a gather or a scatter (n - 1) S.

Letters: L layers, A bytes of one activation (tokens of the whole global batch × width), P bytes of parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from phalanx.config import Plan

V_SHAPED = ("zbv", "dualpipev")


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A transformer, as far as it matters for what is sent.

    Attributes:
        layers: blocks.
        activation: A.
        per_token: bytes of one number for each token of the global batch.
        shared_out: bytes of parameters that tensor parallelism shares out.
        whole: bytes of those that all its ranks hold.
        experts: bytes of those inside experts.
        chosen: experts a token goes to.
    """

    layers: int
    activation: int
    per_token: int
    shared_out: int
    whole: int
    experts: int = 0
    chosen: int = 0


@dataclass(frozen=True, slots=True)
class Term:
    """One line of the sum: what is sent, by which source, how many bytes."""

    what: str
    source: str
    size: float


def terms(plan: Plan, model: Model, batch: int) -> list[Term]:
    """Everything a step under ``plan`` sends; ``batch`` samples in a global batch."""
    return [
        *_gradients(plan, model, batch),
        *_tensor(plan, model),
        *_pipeline(plan, model),
        *_context(plan, model),
        *_expert(plan, model),
    ]


def _gradients(plan: Plan, model: Model, batch: int) -> list[Term]:
    held = model.shared_out + plan.tp * model.whole
    others = plan.dp * plan.cp * plan.ep
    apart = plan.dp * plan.cp
    found = []
    if plan.fsdp > 1:
        micros = batch // plan.replicas // plan.micro if plan.micro else 1
        once = (plan.fsdp - 1) * (held * others + model.experts * apart)
        source = "Rajbhandari et al. 2020, section 7"
        times = {1: 2, 2: micros + 1, 3: 3 * micros}[plan.zero]
        found.append(Term(f"zero={plan.zero}: {times} x a gather or scatter of P", source, times * once))
    added = 2 * (others - 1) * held + 2 * (apart - 1) * model.experts
    if added:
        what, source = "gradients: an all-reduce of P", "Li et al. 2020"
        if plan.fsdp > 1:
            what, source = "copies of shards: an all-reduce", "Zhao et al. 2023, section 3.2.2"
        found.append(Term(what, source, added))
    return found


def _tensor(plan: Plan, model: Model) -> list[Term]:
    if plan.tp == 1:
        return []
    ring = 2 * (plan.tp - 1)
    paper = "Shoeybi et al. 2019, section 3"
    found = [
        Term("each block: 2 all-reduces of A forward, 2 backward", paper, 4 * model.layers * ring * model.activation),
        Term("embedding forward, head backward: an all-reduce of A", paper, 2 * ring * model.activation),
        Term("cross entropy: 3 all-reduces of a number a token", paper, 3 * ring * model.per_token),
    ]
    if plan.sequence:  # each all-reduce is a gather and a scatter: as many bytes
        late = ring * model.whole * prod((plan.dp, plan.fsdp, plan.ep))
        found.append(
            Term("norms' and biases' gradients: an all-reduce", "Korthikanti et al. 2022, section 4.2.2", late)
        )
    return found


def _pipeline(plan: Plan, model: Model) -> list[Term]:
    cuts = plan.pp * plan.stages - 1 - (plan.schedule in V_SHAPED)  # the turn of a V is inside one rank
    if plan.pp == 1:
        return []
    copies = 1 if plan.sequence else plan.tp
    return [
        Term(
            f"{cuts} cuts: A forward, its gradient backward",
            "Narayanan et al. 2021, section 3.2",
            2 * cuts * model.activation * copies,
        )
    ]


def _context(plan: Plan, model: Model) -> list[Term]:
    hops, size = plan.cp - 1, model.layers * model.activation
    if not hops:
        return []
    return [
        Term(*_KEYS[plan.attention], {"ring": 6, "alltoall": 8 / plan.cp, "gather": 4}[plan.attention] * hops * size)
    ]


_KEYS = {
    "ring": ("each block: K, V around forward; K, V and their gradients backward", "Liu et al. 2023"),
    "alltoall": ("each block: Q, K, V, O exchanged, both ways", "Jacobs et al. 2023, section 3.2"),
    "gather": ("each block: K, V gathered, their gradients scattered", "Dubey et al. 2024, section 3.3.2"),
}


def _expert(plan: Plan, model: Model) -> list[Term]:
    if plan.ep == 1:
        return []
    rows = model.layers * model.chosen * model.activation
    return [
        Term(
            "each block: rows to experts and back, both ways",
            "Lepikhin et al. 2021, section 3.2",
            4 * rows * (plan.ep - 1) / plan.ep,
        )
    ]
