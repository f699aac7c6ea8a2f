"""Zero bubble, ZB1P: the weights' half of backward fills the gaps (Qi et al. 2024, section 3)."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.placement.schedules.interleaved import round_of, rounds
from phalanx.placement.schedules.order import Action, PipelineSchedule


def _actions(rank: int, ranks: int, stages: int, micros: int) -> Iterator[Action]:
    return rounds(rank, ranks, stages, micros, zero_bubble=True)


def _in_flight(place: float, ranks: int, stages: int, micros: int, ahead: float) -> float:
    """The warm-up, the forward after it, and what waits for its weights' half; of one stage a rank that is table 1:
    ZB-H1 holds what 1F1B's first rank does, ZB-H2 (``ahead`` = 2) twice as much."""
    warm_up = (stages - 1) * round_of(ranks, micros) + ranks
    return min(warm_up / stages + (ahead - 1) * (ranks - 1), micros)


ZERO_BUBBLE = PipelineSchedule(
    name="zero-bubble", actions=_actions, in_flight=_in_flight, filling="weights", in_halves=True, searched=(2,)
)
