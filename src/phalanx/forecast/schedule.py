"""A pipeline's step as events: the actions of its schedule, each as soon as its rank and its inputs are there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from phalanx.placement.schedules import Action, cost, makespan, order
from phalanx.spec.plan import Schedule

_FEW, _MOST = 4, 8
"""Rounds of as many micro-batches as ranks after which each further one takes the same time; where some are left over,
as many rounds as these, up to ``_MOST``, because schedules that go in rounds spread them over all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
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
def duration(pipeline: Pipeline) -> float:
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


def _run(pipeline: Pipeline, micros: int) -> float:
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
