"""A pipeline's step: how parts lie on its ranks, and the actions of its schedule as events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from phalanx.config.model_costs import ModelPart, Weights, flops
from phalanx.config.plan import Schedule
from phalanx.forecast.layouts import RECOMPUTES, SCHEDULES, Layouts
from phalanx.forecast.operation_arrays import Array, OperationArrays
from phalanx.placement.schedules import Action, Filling, cost, holders, in_halves, makespan, order
from phalanx.placement.stages import on_ranks as placed


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lanes:
    """Seconds of one micro-batch on the first rank of a pipeline, on those between and on the last: shape (3, N).

    Attributes:
        forward: of it.
        backward: of it, all.
        weights: of the backward, what yields weights' gradients only.
        there: how many ranks of each kind there are.
        send: to hand something to the next rank: shape (N,).
    """

    forward: Array
    backward: Array
    weights: Array
    there: Array
    send: Array


def pipeline(lanes: Lanes, layouts: Layouts) -> Array:
    """Seconds from the first forward to the last backward, from the times of first, middle and last ranks.

    1F1B and interleaving: Narayanan et al. 2021, section 2.2; zero bubble: Qi et al. 2024, table 2; each with ranks
    that take different times: the slowest is never idle but for the way of one micro-batch through the others.
    """
    forward, backward, weights, there, send = lanes.forward, lanes.backward, lanes.weights, lanes.there, lanes.send
    micros, pp, v = layouts.micros, layouts.pp, np.maximum(layouts.stages, 1)
    there_now = there > 0
    one = forward + backward + 2 * send * np.where(pp > 1, v, 0)
    slowest = np.where(there_now, one, 0).max(axis=0)
    through = (one * there).sum(axis=0)
    plain: Array = micros * slowest + (through - slowest)
    phases = (micros - 1) * (
        np.where(there_now, forward + send, 0).max(axis=0) + np.where(there_now, backward + send, 0).max(axis=0)
    ) + ((forward + backward + 2 * send) * there).sum(axis=0)
    by_stages = micros * slowest + (through - slowest) / v
    hidden = (np.maximum(through - slowest - 2 * (weights * there).sum(axis=0) * (pp - 1) / np.maximum(pp, 1), 0)) / v
    found: dict[Filling, Array] = {
        "two phases": phases,
        "one way": plain,
        "a stage at a time": by_stages,
        "weights": micros * slowest + hidden,
    }
    which = [layouts.scheduled(lambda one, filling=filling: one.filling == filling) for filling in found]
    return np.where(pp > 1, np.select(which, list(found.values())), micros * slowest)


def simulated(lanes: Lanes, layouts: Layouts, *, whole: bool = False, recomputes: bool = False) -> Array:
    """As ``pipeline``, by running every candidate's schedule event by event; what is alike is run once.

    With ``whole`` backwards are done in halves only where the runtime does so; ``recomputes``: the model recomputes
    activations by itself.
    """
    forward, backward, weights, send = lanes.forward, lanes.backward, lanes.weights, lanes.send
    found = np.zeros_like(layouts.pp)
    for at, ranks in enumerate(layouts.pp.astype(int)):
        where = [0, *[1] * (ranks - 2), 2][:ranks]
        chunks, recompute = max(int(layouts.stages[at]), 1), RECOMPUTES[int(layouts.recompute[at])]
        one = PipelineTimes(
            schedule=SCHEDULES[int(layouts.schedule[at])] if ranks > 1 else "gpipe",
            halves=not whole
            or in_halves(recompute, int(layouts.zero[at]), compiles=bool(layouts.compiles[at]), recomputes=recomputes),
            ranks=int(ranks),
            chunks=chunks if ranks > 1 else 1,
            micros=int(layouts.micros[at]),
            forward=tuple(float(forward[kind, at] + chunks * send[at]) for kind in where),
            inputs=tuple(float(backward[kind, at] - weights[kind, at] + chunks * send[at]) for kind in where),
            weights=tuple(float(weights[kind, at]) for kind in where),
        )
        found[at] = duration(one)
    return found


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageCounts:
    """How parts lie on the ranks of ``pp``.

    Attributes:
        each: for every part, how many of it the busiest kind of rank holds: first, middle, last: shape (3, parts, N).
        there: how many ranks of each kind there are: shape (3, N).
    """

    each: Array
    there: Array


def stages(costs: OperationArrays, layouts: Layouts) -> StageCounts:
    """The first rank, the busiest between, and the last one."""
    pp = layouts.pp
    there = np.stack([np.ones_like(pp), np.maximum(pp - 2, 0), np.where(pp > 1, 1.0, 0.0)])
    work = np.array([sum(flops(one, 1.0, costs.length) for one in part.forward) for part in costs.parts])
    each = on_ranks(costs.parts, costs.length, layouts, costs.balanced, lambda ranks: max(ranks, key=work.__matmul__))
    if not costs.balanced:  # others' runs with fewer blocks at the ends take as long as if these were full
        blocks = [part.role == "block" for part in costs.parts]
        each[:, blocks] = each[:, blocks].max(axis=0)
    return StageCounts(each=each, there=there)


Rank = tuple[float, ...]
"""How many of each part a rank of a pipeline holds."""


def on_ranks(
    parts: Sequence[ModelPart], length: int, layouts: Layouts, balanced: bool, pick: Callable[[Sequence[Rank]], Rank]
) -> Array:
    """How many of each part the first rank holds, the one that is picked of those between, and the last: (3, parts, N).

    ``balanced``: by cost, as ``placement`` cuts; else blocks are dealt out evenly, fewer to the ends, what comes before
    them to the first stage and what comes after to the last.
    """
    keys = np.stack([layouts.schedule, layouts.pp, np.maximum(layouts.stages, 1)]).astype(int)
    unlike, which = np.unique(keys, axis=1, return_inverse=True)
    found = np.empty((3, len(parts), unlike.shape[1]))
    for at in range(unlike.shape[1]):
        schedule, ranks, chunks = (int(one) for one in unlike[:, at])
        way = placed if balanced else _evenly
        each: Sequence[Rank] = way(parts, length, SCHEDULES[schedule], ranks, chunks if ranks > 1 else 1)
        found[..., at] = each[0], pick(each[1:-1] or each), each[-1]
    return found[..., which.reshape(-1)]


def _evenly(parts: Sequence[ModelPart], length: int, schedule: Schedule, ranks: int, chunks: int) -> tuple[Rank, ...]:
    blocks = sum(part.count for part in parts if part.role == "block")
    full = -(-blocks // ranks)
    last = holders(schedule, ranks, ranks * chunks)[-1]
    fewer = {ranks - 1: 1, 0: 2}  # of the ends, the last one first
    missing = full * ranks - blocks
    return tuple(
        tuple(
            (full - (missing >= fewer.get(rank, ranks))) * part.count / max(blocks, 1)
            if part.role == "block"
            else part.count * (rank == (0 if part.role == "before" else last))
            for part in parts
        )
        for rank in range(ranks)
    )


def parameters_held(
    costs: OperationArrays, layouts: Layouts, lie: StageCounts, *, experts: bool | None = None
) -> Array:
    """Parameters on the rank that holds most, before ``fsdp`` shards them; with ``experts`` theirs, or the others."""
    each = np.zeros((len(costs.parts), len(layouts.tp)))
    for index, part in enumerate(costs.parts):
        for one in (one for one in part.weights if experts is None or one.expert is experts):
            each[index] += (one.elements + one.frozen) / divided(one, layouts)
    return np.einsum("kpn,pn->kn", lie.each, each).max(axis=0)


def divided(weights: Weights, layouts: Layouts) -> Array:
    """By how many ranks of ``tp`` and ``ep`` a part's weights are cut."""
    return np.where(weights.share == "inner", layouts.tp, 1.0) * np.where(weights.expert, layouts.ep, 1.0)


_FEW, _MOST = 4, 8
"""Rounds of as many micro-batches as ranks after which each further one takes the same time; where some are left over,
as many rounds as these, up to ``_MOST``, because schedules that go in rounds spread them over all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineTimes:
    """What takes how long, in seconds of one micro-batch.

    Attributes:
        schedule: its name.
        ranks: of ``pp``.
        chunks: stages on each rank.
        micros: micro-batches in a step.
        forward: by rank, of all its stages.
        inputs: the backward's half for the stage's inputs.
        weights: the half for its weights.
        send: to hand something to another rank.
        halves: whether a backward may be done in halves.
    """

    schedule: Schedule
    ranks: int
    chunks: int
    micros: int
    forward: tuple[float, ...]
    inputs: tuple[float, ...]
    weights: tuple[float, ...]
    send: float = 0.0
    halves: bool = True

    @property
    def busiest(self) -> float:
        """Seconds that the rank with most to do works: no schedule takes less."""
        each = zip(self.forward, self.inputs, self.weights, strict=True)
        return self.micros * max(sum(parts) for parts in each)


@lru_cache(maxsize=4096)
def duration(pipeline: PipelineTimes) -> float:
    """Seconds from the first forward to the last backward.

    Of many micro-batches, as long as a few take and the rest at the pace that these have come to.
    """
    over = pipeline.micros % pipeline.ranks
    few = pipeline.ranks * max(_FEW, min(over, _MOST)) + over
    if pipeline.micros <= 2 * few:
        return _run(pipeline, pipeline.micros)
    steady = _run(pipeline, few + pipeline.ranks)
    each = (steady - _run(pipeline, few)) / pipeline.ranks
    return max(pipeline.busiest, steady + each * (pipeline.micros - few - pipeline.ranks))


def _run(pipeline: PipelineTimes, micros: int) -> float:
    chunks, schedule = pipeline.chunks, pipeline.schedule
    each = [
        {
            (kind, later): cost(
                Action(kind, int(later), 0), forward=forward, inputs=inputs, weights=weights, halves=pipeline.halves
            )
            / chunks
            for kind in ("F", "B", "I", "W")
            for later in (False, True)
        }
        for forward, inputs, weights in zip(pipeline.forward, pipeline.inputs, pipeline.weights, strict=True)
    ]
    laid = order(schedule, pipeline.ranks, chunks, micros)
    return makespan(laid, lambda rank, action: each[rank][action.kind, action.stage > 0], pipeline.send)
