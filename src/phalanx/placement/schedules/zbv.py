"""ZB-V: zero bubble with stages laid out as a V, rank r holds r and 2N - 1 - r (Qi et al. 2024, section 6); DualPipeV.

DualPipeV: a V that pairs each forward with another micro-batch's backward (DeepSeek-AI 2024, 2025).
"""

from __future__ import annotations

from typing import Literal

from phalanx.placement.schedules.order import Action, Kind, PipelineSchedule


class TwoStages:
    """The actions of a rank with two stages, micro-batch after micro-batch for each kind and stage."""

    def __init__(self, stages: tuple[int, int]) -> None:
        self.actions: list[Action] = []
        self._owed: list[Action] = []
        self._stages = stages
        self._next = {(kind, stage): 0 for kind in "FB" for stage in (0, 1)}

    def count(self, kind: Literal["F", "B"], stage: int) -> int:
        """Return the forwards or backwards so far of one of the two stages."""
        return self._next[kind, stage]

    def do(self, *what: tuple[Kind, int]) -> None:
        """Append the next micro-batch of each kind and stage, 0 or 1; an ``I`` leaves its weight gradients pending."""
        for kind, stage in what:
            key = ("F" if kind == "F" else "B", stage)
            self.actions.append(Action(kind, self._stages[stage], self._next[key]))
            self._next[key] += 1
            if kind == "I":
                self._owed.append(Action("W", self._stages[stage], self.actions[-1].micro))

    def owes(self, stage: int | None = None) -> list[Action]:
        """Return pending weight gradients, the oldest first; of one of the two stages if given."""
        return [one for one in self._owed if stage is None or one.stage == self._stages[stage]]

    def work_off(self, stage: int | None = None) -> None:
        for oldest in self.owes(stage)[:1]:
            self._owed.remove(oldest)
            self.actions.append(oldest)


def _actions(rank: int, ranks: int, stages: int, micros: int) -> list[Action]:
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


def _dualpipev_actions(rank: int, ranks: int, stages: int, micros: int) -> list[Action]:
    """Build DeepSeek's DualPipe (2024, section 3.2.1) cut in half to a V: eight phases, named in its published code."""
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


def _dualpipev_in_flight(place: float, ranks: int, stages: int, micros: int, ahead: float) -> float:
    return min((micros + place + 1) / 2, micros, ranks + 0.5)


DUALPIPEV = PipelineSchedule(
    name="dualpipev",
    actions=_dualpipev_actions,
    in_flight=_dualpipev_in_flight,
    filling="weights",
    v_shaped=True,
    in_halves=True,
)
