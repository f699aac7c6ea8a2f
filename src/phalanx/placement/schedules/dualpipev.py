"""DualPipeV: a V that pairs each forward with another micro-batch's backward (DeepSeek-AI 2024, 2025)."""

from __future__ import annotations

from phalanx.placement.schedules.order import Action, PipelineSchedule
from phalanx.placement.schedules.zbv import TwoStages


def _actions(rank: int, ranks: int, stages: int, micros: int) -> list[Action]:
    """DeepSeek's DualPipe (2024, section 3.2.1) cut in half to a V: eight phases, named in its published code."""
    at = TwoStages((rank, 2 * ranks - 1 - rank))
    last = ranks - 1 - rank
    for _ in range(2 * last):
        at.do(("F", 0))
    for _ in range(rank + 1):
        at.do(("F", 0), ("F", 1))
    for _ in range(last):
        at.do(("I", 1))
        at.work_off()
        at.do(("F", 1))
    for _ in range(max(micros, 2 * ranks) - 2 * ranks + rank + 1):
        at.do(("F", 0), ("B", 1), ("F", 1), ("B", 0))
    for _ in range(last):
        at.do(("B", 1), ("F", 1), ("B", 0))
    halved = False
    for turn in range(rank + 1):
        halved = halved or (turn == (rank + 1) // 2 and rank % 2 == 1)
        at.do(("I" if halved else "B", 1))
        halved = halved or (turn == (rank + 1) // 2 and rank % 2 == 0)
        at.do(("I" if halved else "B", 0))
    for _ in range(last):
        at.work_off()
        at.do(("I" if halved else "B", 0))
    while at.owes():
        at.work_off()
    return at.actions


def _in_flight(place: float, ranks: int, stages: int, micros: int, ahead: float) -> float:
    return min((micros + place + 1) / 2, micros, ranks + 0.5)


DUALPIPEV = PipelineSchedule(
    name="dualpipev", actions=_actions, in_flight=_in_flight, filling="weights", v_shaped=True, in_halves=True
)
