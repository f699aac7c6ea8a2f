"""The actions of a rank with two stages of a V, put together one after another."""

from __future__ import annotations

from typing import Literal

from phalanx.placement.schedules.order import Action, Kind


class TwoStages:
    """The actions of a rank with two stages, micro-batch after micro-batch for each kind and stage."""

    def __init__(self, stages: tuple[int, int]) -> None:
        self.actions: list[Action] = []
        self._owed: list[Action] = []
        self._stages = stages
        self._next = {(kind, stage): 0 for kind in "FB" for stage in (0, 1)}

    def count(self, kind: Literal["F", "B"], stage: int) -> int:
        """Forwards or backwards so far of one of the two stages."""
        return self._next[kind, stage]

    def do(self, *what: tuple[Kind, int]) -> None:
        """The next micro-batch of each kind and stage, 0 or 1; gradients of weights are owed after an ``I``."""
        for kind, stage in what:
            key = ("F" if kind == "F" else "B", stage)
            self.actions.append(Action(kind, self._stages[stage], self._next[key]))
            self._next[key] += 1
            if kind == "I":
                self._owed.append(Action("W", self._stages[stage], self.actions[-1].micro))

    def owes(self, stage: int | None = None) -> list[Action]:
        """Gradients of weights that are still to be computed, the oldest first; of one of the two stages if given."""
        return [one for one in self._owed if stage is None or one.stage == self._stages[stage]]

    def work_off(self, stage: int | None = None) -> None:
        for oldest in self.owes(stage)[:1]:
            self._owed.remove(oldest)
            self.actions.append(oldest)
