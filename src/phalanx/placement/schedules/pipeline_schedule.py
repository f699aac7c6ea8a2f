"""What a pipeline schedule is: the order of each rank, and what forecasts and drawings read of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from phalanx.config.fields import Schedule as Name

Kind = Literal["F", "B", "I", "W"]

Filling = Literal["two phases", "one way", "a stage at a time", "weights"]
"""What the ranks that wait for the first or the last micro-batch do meanwhile, by which forecasts tell how long a step
takes: they wait for all forwards and then for all backwards; for one way through the ranks and back; for one way
through a stage of each; or they compute weights' gradients.
"""


class Action(NamedTuple):
    """One piece of work of a rank.

    Attributes:
        kind: ``F`` forward; ``B`` backward, or its halves: ``I`` for the stage's inputs and ``W`` for its weights.
        stage: of the pipeline.
        micro: which micro-batch.
    """

    kind: Kind
    stage: int
    micro: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSchedule:
    """One schedule. A new one is a file with one of these, its name in ``config.fields`` and its line in a table.

    Attributes:
        name: as plans say it.
        actions: ``(rank, ranks, stages_per_rank, micros)`` → the actions of that rank in order, for so many
            micro-batches or more: those of micro-batches that are not there are left out.
        in_flight: ``(place, ranks, stages_per_rank, micros, ahead)`` → micro-batches, of the whole rank, that the rank
            at ``place`` holds between forward and backward when it holds most; ``ahead``: how far zero-bubble
            schedules run ahead of 1F1B.
        filling: see ``Filling``.
        v_shaped: whether the way through the stages is a V, which ends on the rank where it began.
        in_halves: whether backwards are done in two passes.
        searched: stages on a rank with which the planner tries it, fewest first.
    """

    name: Name
    actions: Callable[[int, int, int, int], Iterable[Action]]
    in_flight: Callable[[float, int, int, int, float], float]
    filling: Filling
    v_shaped: bool = False
    in_halves: bool = False
    searched: tuple[int, ...] = ()
