"""A pipeline's step: the distribution of parts over its ranks, and the actions of its schedule as events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from phalanx.config.model_costs import ModelPart, Profile, flops
from phalanx.config.plan import Schedule
from phalanx.forecast.layouts import RECOMPUTES, SCHEDULES, Layouts
from phalanx.forecast.operation_arrays import Array, OperationArrays
from phalanx.placement.collective_bytes import Elements, MeshSizes, elements
from phalanx.placement.schedules import Action, Filling, cost, ends, holders, in_halves, order
from phalanx.placement.stages import on_ranks as placed
from phalanx.placement.stages import sends
from phalanx.placement.step_traffic import weights_held


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lanes:
    """Seconds of one micro-batch on the first rank of a pipeline, on those between and on the last: shape (3, N)."""

    forward: Array  # of it, with the messages sent
    backward: Array  # likewise
    weights: Array  # of the backward, for weights' gradients only
    there: Array  # how many ranks of each kind there are


def pipeline(lanes: Lanes, layouts: Layouts) -> Array:
    """Return seconds from the first forward to the last backward, by times of first, middle and last ranks.

    1F1B and interleaving: Narayanan et al. 2021, section 2.2; zero bubble: Qi et al. 2024, table 2; each with ranks of
    different speed: the slowest is idle only while one micro-batch passes the others.
    """
    forward, backward, weights, there = lanes.forward, lanes.backward, lanes.weights, lanes.there
    micros, pp, v = layouts.micros, layouts.pp, np.maximum(layouts.stages, 1)
    one, there_now = forward + backward, there > 0
    slowest = np.where(there_now, one, 0).max(axis=0)
    through = (one * there).sum(axis=0)
    plain: Array = micros * slowest + (through - slowest)
    phases = (micros - 1) * sum(np.where(there_now, each, 0).max(axis=0) for each in (forward, backward)) + through
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
    """Return the same as ``pipeline`` by simulating every candidate's schedule; equal ones are run once.

    ``whole``: backwards are done in halves only where the runtime does so; ``recomputes``: the model recomputes
    activations by itself.
    """
    forward, inputs, weights = lanes.forward, lanes.backward - lanes.weights, lanes.weights
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
            forward=tuple(forward[where, at].tolist()),
            inputs=tuple(inputs[where, at].tolist()),
            weights=tuple(weights[where, at].tolist()),
        )
        found[at] = duration(one)
    return found


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageCounts:
    """Counts of parts on the ranks of ``pp``: the first, the busiest of the middle ones, and the last."""

    each: Array  # how many of each part such a rank holds: shape (3, parts, N)
    there: Array  # how many ranks of each kind there are: shape (3, N)
    # messages that such a rank sends for a micro-batch, in the forward and in the backward: shape (2, 3, N)
    sent: Array


def stages(costs: OperationArrays, layouts: Layouts) -> StageCounts:
    """Return the distribution of a model's parts, and the messages of its stages."""
    pp, parts, length = layouts.pp, costs.parts, costs.profile.length
    there = np.stack([np.ones_like(pp), np.maximum(pp - 2, 0), np.where(pp > 1, 1.0, 0.0)])
    work = np.array([sum(flops(one, 1.0, length) for one in part.forward) for part in parts])
    each = on_ranks(parts, length, layouts, costs.balanced, lambda ranks: max(ranks, key=work.__matmul__))
    if not costs.balanced:  # others' runs with fewer blocks at the ends take as long as if these were full
        blocks = [part.role == "block" for part in parts]
        each[:, blocks] = each[:, blocks].max(axis=0)

    def sent(schedule: Schedule, ranks: int, chunks: int) -> Any:
        return np.transpose([sends(schedule, ranks, chunks, rank) for rank in (0, min(1, ranks - 1), ranks - 1)])

    return StageCounts(each=each, there=there, sent=by_pipeline(layouts, sent))


def by_pipeline(layouts: Layouts, value: Callable[..., Any], *more: Array) -> Array:
    """Return ``value`` of each candidate's schedule, ranks of ``pp``, stages on each and ``more``, along the last axis.

    It is computed once for equal ones.
    """
    columns = (layouts.schedule, layouts.pp, np.where(layouts.pp > 1, np.maximum(layouts.stages, 1), 1), *more)
    key = np.zeros(len(layouts.pp), dtype=np.int64)  # one number for all: sorting rows takes as long as the search
    for column in columns:
        key = key * (int(column.max(initial=0)) + 1) + column.astype(np.int64)
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    unlike = np.stack(columns)[:, first].astype(int).T.tolist() or [[0, *[1] * (len(columns) - 1)]]
    found = [np.asarray(value(SCHEDULES[schedule], *rest), dtype=float) for schedule, *rest in unlike]
    return np.stack(found, axis=-1)[..., which.reshape(-1)]


Rank = tuple[float, ...]
"""How many of each part a rank of a pipeline holds."""


def on_ranks(
    parts: Sequence[ModelPart], length: int, layouts: Layouts, balanced: bool, pick: Callable[[Sequence[Rank]], Rank]
) -> Array:
    """Return counts of each part on the first rank, the middle rank chosen by ``pick``, and the last: (3, parts, N).

    ``balanced``: by cost, as in ``placement``; else blocks are spread evenly, fewer to the ends; parts before them go
    to the first stage and parts after them to the last.
    """

    def three(schedule: Schedule, ranks: int, chunks: int) -> list[Rank]:
        each: Sequence[Rank] = (placed if balanced else _evenly)(parts, length, schedule, ranks, chunks)
        return [each[0], pick(each[1:-1] or each), each[-1]]

    return by_pipeline(layouts, three)


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


def held(profile: Profile, counts: Array, mesh: MeshSizes) -> list[Elements]:
    """Return parameters on ranks with these counts of parts: of experts, and of the rest; shape (3, N) each.

    ``counts``: as ``StageCounts.each``.
    """
    found = elements(weights_held(profile, list(np.moveaxis(counts, 1, 0))), mesh)
    return found or [Elements(learn=np.zeros_like(counts[:, 0]))]


def parameters_held(costs: OperationArrays, layouts: Layouts, lie: StageCounts) -> Array:
    """Return parameters on the rank with most, before ``fsdp`` shards them."""
    found = held(costs.profile, lie.each, layouts.mesh)
    return sum((one.learn + one.frozen for one in found), np.zeros_like(lie.there)).max(axis=0)


_FEW, _MOST = 4, 8
"""Rounds of as many micro-batches as ranks after which each further one takes the same time; where some are left over,
as many rounds as these, up to ``_MOST``, because schedules that go in rounds spread them over all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineTimes:
    """Durations of actions, in seconds of one micro-batch."""

    schedule: Schedule  # its name
    ranks: int  # of ``pp``
    chunks: int  # stages on each rank
    micros: int  # micro-batches in a step
    forward: tuple[float, ...]  # by rank, of all its stages
    inputs: tuple[float, ...]  # the backward's half for the stage's inputs
    weights: tuple[float, ...]  # the half for its weights
    halves: bool = True  # whether a backward may be done in halves

    @property
    def busiest(self) -> float:
        """Return the working seconds of the busiest rank, a lower bound for any schedule."""
        each = zip(self.forward, self.inputs, self.weights, strict=True)
        return self.micros * max(sum(parts) for parts in each)


@lru_cache(maxsize=4096)
def duration(pipeline: PipelineTimes) -> float:
    """Return seconds from the first forward to the last backward.

    Many micro-batches take as long as a few, plus the rest at the pace reached by then.
    """
    over = pipeline.micros % pipeline.ranks
    few = pipeline.ranks * max(_FEW, min(over, _MOST)) + over
    if pipeline.micros <= 2 * few:
        return _run(pipeline, pipeline.micros)
    steady = _run(pipeline, few + pipeline.ranks)
    each = (steady - _run(pipeline, few)) / pipeline.ranks
    return max(pipeline.busiest, steady + each * (pipeline.micros - few - pipeline.ranks))


def _run(pipeline: PipelineTimes, micros: int) -> float:
    laid = order(pipeline.schedule, pipeline.ranks, pipeline.chunks, micros)

    @cache
    def takes(kind: Any, stage: int) -> float:
        each = {name: getattr(pipeline, name)[laid.rank_of[stage]] for name in ("forward", "inputs", "weights")}
        return cost(Action(kind, stage, 0), **each, halves=pipeline.halves) / pipeline.chunks

    return max(ends(laid, [takes(action.kind, action.stage) for action in laid.links.action]))
