"""GPipe: all forwards, then all backwards (Huang et al. 2019)."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.placement.schedules.order import Action, PipelineSchedule
from phalanx.placement.schedules.schedule_1f1b import alternating


def _actions(rank: int, ranks: int, stages: int, micros: int) -> Iterator[Action]:
    return alternating(rank, micros, micros)


def _in_flight(place: float, ranks: int, stages: int, micros: int, ahead: float) -> float:
    return micros


GPIPE = PipelineSchedule(name="gpipe", actions=_actions, in_flight=_in_flight, filling="two phases")
