"""1F1B: a backward as soon as there is one: holds fewer activations (Narayanan et al. 2021, section 2.2.1); GPipe.

GPipe: all forwards, then all backwards (Huang et al. 2019).
"""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.placement.schedules.order import Action, PipelineSchedule


def alternating(stage: int, ahead: int, micros: int) -> Iterator[Action]:
    """Yield forwards, from the ``ahead``-th on a backward after each."""
    for micro in range(micros + ahead):
        if micro < micros:
            yield Action("F", stage, micro)
        if micro >= ahead:
            yield Action("B", stage, micro - ahead)


def _actions(rank: int, ranks: int, stages: int, micros: int) -> Iterator[Action]:
    return alternating(rank, ranks - 1 - rank, micros)


def _in_flight(place: float, ranks: int, stages: int, micros: int, ahead: float) -> float:
    return min(micros, ranks - place)


ONE_F_ONE_B = PipelineSchedule(name="1f1b", actions=_actions, in_flight=_in_flight, filling="one way", searched=(1,))


def _gpipe_actions(rank: int, ranks: int, stages: int, micros: int) -> Iterator[Action]:
    return alternating(rank, micros, micros)


def _gpipe_in_flight(place: float, ranks: int, stages: int, micros: int, ahead: float) -> float:
    return micros


GPIPE = PipelineSchedule(name="gpipe", actions=_gpipe_actions, in_flight=_gpipe_in_flight, filling="two phases")
