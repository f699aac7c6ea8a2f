"""Prices the plans of a space: memory for all, time for those that fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.forecast.forecast import times
from phalanx.forecast.memory import memory
from phalanx.planner.question import Question
from phalanx.planner.space import MESH, Space, space
from phalanx.spec import Plan

Array = npt.NDArray[np.float64]
_KINDS = 3  # of recompute, three rows in a row


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Search:
    """What came of pricing.

    Attributes:
        question: that was asked.
        considered: plans whose memory was priced.
        fitting: how many of them fit.
        least: bytes that the least hungry of them reserves; 0 where there was none.
        leanest: it; ``None`` where there was none.
        space: those whose time was priced, too: of plans that differ in recompute only, the one that fits and computes
            least again.
        seconds: of a step, of those: shape (N,).
        reserved: bytes on the rank that needs most, of those.
        order: of those, the fastest first.
    """

    question: Question
    considered: int
    fitting: int
    least: float
    leanest: Plan | None
    space: Space
    seconds: Array
    reserved: Array
    order: npt.NDArray[np.intp]

    @property
    def best(self) -> Plan | None:
        """The fastest that fits."""
        return self.space.plan(int(self.order[0])) if len(self.order) else None

    @property
    def step(self) -> float:
        """Seconds of its step; infinite where none fits."""
        return float(self.seconds[self.order[0]]) if len(self.order) else float("inf")

    def by_mesh(self, most: int) -> list[Plan]:
        """The fastest plan of each mesh, the fastest first, at most so many."""
        if not len(self.order):
            return []
        mesh = np.stack([self.space.columns[name][self.order] for name in MESH])
        _, first = np.unique(mesh, axis=1, return_index=True)
        return [self.space.plan(int(self.order[at])) for at in np.sort(first)[:most]]


def search(question: Question, held: Mapping[str, Any] | None = None) -> Search:
    """Price every plan of the question; only those with the values of ``held``, where given."""
    whole = space(question)
    if held:
        whole = whole.take(whole.where(held))
    work, precision = question.work, question.precision
    room = min(float(group.device.room) for group in question.cluster.groups)
    reserved = memory(work.profile, whole.layouts(), question.habits, precision, work.state).reserved
    fits: npt.NDArray[np.bool_] = reserved <= room
    kept = np.flatnonzero(fits if held and "recompute" in held else _least_again(fits))
    found = whole.take(kept)
    if len(kept):
        seconds: Array = times(work, found.layouts(), question.cluster, precision, question.habits).total
    else:
        seconds = np.zeros(0)
    at = int(reserved.argmin()) if len(reserved) else -1
    return Search(
        question=question,
        considered=len(whole),
        fitting=int(fits.sum()),
        least=float(reserved[at]) if at >= 0 else 0.0,
        leanest=whole.plan(at) if at >= 0 else None,
        space=found,
        seconds=seconds,
        reserved=reserved[kept],
        order=_order(found, seconds, reserved[kept]),
    )


def _least_again(fits: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Of each three that differ in recompute only, the first that fits."""
    each = fits.reshape(-1, _KINDS)
    return (each & (each.cumsum(axis=1) == 1)).reshape(-1)


def _order(found: Space, seconds: Array, reserved: Array) -> npt.NDArray[np.intp]:
    """The fastest first; of equally fast ones the simplest, then the one that needs least memory."""
    columns = found.columns
    keys = (reserved, columns["zero"], columns["schedule"], columns["fsdp"], np.round(seconds, 9))
    return np.lexsort(keys) if len(seconds) else np.zeros(0, dtype=np.intp)
