"""ZB-V: zero bubble with stages laid out as a V, rank r holds r and 2N - 1 - r (Qi et al. 2024, section 6)."""

from __future__ import annotations

from phalanx.placement.schedules.order import Action, PipelineSchedule
from phalanx.placement.schedules.v_shaped import TwoStages


def _actions(rank: int, ranks: int, stages: int, micros: int) -> list[Action]:
    """A V of two stages a rank, every backward in halves."""
    at = TwoStages((rank, 2 * ranks - 1 - rank))
    full = max(2 * ranks - 1, micros)
    for _ in range(2 * (ranks - rank) - 1):
        at.do(("F", 0))
    for _ in range(rank):
        at.do(("F", 1), ("F", 0))
    for _ in range(ranks - rank):
        at.do(("F", 1), ("I", 1))
        at.work_off(1)
    while at.count("F", 1) < at.count("F", 0) or at.count("F", 0) < full:
        if at.count("F", 0) < full:
            at.do(("F", 0))
        at.do(("I", 0))
        at.work_off(0)
        at.do(("F", 1), ("I", 1))
        at.work_off(1)
    for _ in range(rank):
        at.do(("I", 0), ("I", 1))
    for _ in range(ranks - rank):
        at.do(("I", 0))
        at.work_off(0)
    for stage in (1, 0):
        while at.owes(stage):
            at.work_off(stage)
    return at.actions


def _in_flight(place: float, ranks: int, stages: int, micros: int, ahead: float) -> float:
    return min((micros + place + 1) / 2, micros, ranks)


ZBV = PipelineSchedule(
    name="zbv", actions=_actions, in_flight=_in_flight, filling="weights", v_shaped=True, in_halves=True, searched=(2,)
)
