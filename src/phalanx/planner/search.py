"""Prices the plans of a space: memory for all, time for those that fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.forecast.alone import Scene
from phalanx.forecast.forecast import times
from phalanx.forecast.odds import SAFE
from phalanx.forecast.unequal import deal, memory_of
from phalanx.planner.question import Question
from phalanx.planner.space import MESH, Space, space
from phalanx.spec import Plan

Array = npt.NDArray[np.float64]
_KINDS = 3  # of recompute, three rows in a row
_NEAR = 2000  # plans among which the first are looked for
_ALIKE = 12  # of them, at most so many are run because they are nearly as fast as the first
_SLACK = 2e-3  # by which the formula of a pipeline may say too much
_ROUNDS = 24
_LONG = 8  # micro-batches for each stage, from which on the ends of a pipeline hardly count and running it takes long


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Search:
    """What came of pricing.

    Attributes:
        question: that was asked.
        considered: plans whose memory was priced.
        fitting: how many of them fit.
        safe: how many of these leave a margin; plans without are ranked only where there are no others.
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
    safe: int
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
        first = _first_of_mesh(self.space, self.order)
        return [self.space.plan(int(self.order[at])) for at in first[:most]]


def search(question: Question, held: Mapping[str, Any] | None = None, *, most: int = 1) -> Search:
    """Price every plan of the question.

    Args:
        question: what is asked.
        held: keys of a plan → values that all shall have; all plans where not given.
        most: meshes whose best plans are to be in the right order among each other.
    """
    whole = space(question)
    if held:
        whole = whole.take(whole.where(held))
    work, precision = question.work, question.precision
    scene = Scene(work=work, cluster=question.cluster, precision=precision, habits=question.habits)
    needed, room = memory_of(scene, deal(scene, whole.layouts()))
    reserved = needed.reserved
    fits: npt.NDArray[np.bool_] = reserved <= room
    safe: npt.NDArray[np.bool_] = reserved <= SAFE * room
    ranked = safe if safe.any() else fits
    kept = np.flatnonzero(ranked if held and "recompute" in held else _least_again(ranked))
    found = whole.take(kept)
    seconds, order = _priced(question, found, reserved[kept], most)
    at = int((reserved - room).argmin()) if len(reserved) else -1
    return Search(
        question=question,
        considered=len(whole),
        fitting=int(fits.sum()),
        safe=int(safe.sum()),
        least=float(reserved[at]) if at >= 0 else 0.0,
        leanest=whole.plan(at) if at >= 0 else None,
        space=found,
        seconds=seconds,
        reserved=reserved[kept],
        order=order,
    )


def _priced(question: Question, found: Space, reserved: Array, most: int) -> tuple[Array, npt.NDArray[np.intp]]:
    """Seconds of every plan, and the fastest first.

    A formula prices all pipelines; it says hardly ever more than running their events does. Those that come out first
    are run, until the best of the first ``most`` meshes all have been, and what is nearly as fast as the first.
    """
    if not len(found):
        return np.zeros(0), np.zeros(0, dtype=np.intp)
    work, precision, habits = question.work, question.precision, question.habits
    seconds: Array = times(work, found.layouts(), question.cluster, precision, habits).total
    order = _order(found, seconds, reserved)
    near = order[:_NEAR]
    columns = found.columns
    micros = -(-found.share // columns["micro"])
    run = (columns["pp"] == 1) | (micros >= _LONG * columns["pp"] * columns["stages"])
    for _ in range(_ROUNDS):
        alike = near[:_ALIKE][seconds[near[:_ALIKE]] < seconds[near[0]] * (1 + _SLACK)]
        first = np.union1d(near[_first_of_mesh(found, near)[:most]], alike)
        waiting = first[~run[first]]
        if not len(waiting):
            break
        layouts = found.take(waiting).layouts()
        seconds[waiting] = times(work, layouts, question.cluster, precision, habits, events=True).total
        run[waiting] = True
        near = near[_order(found.take(near), seconds[near], reserved[near])]
    return seconds, np.concatenate([near, order[_NEAR:]])


def _first_of_mesh(found: Space, order: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Places in ``order`` where a mesh comes first."""
    mesh = np.zeros(len(order), dtype=np.int64)
    for name in MESH:
        mesh = mesh * (int(found.columns[name].max(initial=0)) + 1) + found.columns[name][order]
    return np.sort(np.unique(mesh, return_index=True)[1])


def _least_again(fits: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Of each three that differ in recompute only, the first that fits."""
    each = fits.reshape(-1, _KINDS)
    return (each & (each.cumsum(axis=1) == 1)).reshape(-1)


def _order(found: Space, seconds: Array, reserved: Array) -> npt.NDArray[np.intp]:
    """The fastest first; of equally fast ones the simplest, then the one that needs least memory."""
    columns = found.columns
    keys = (reserved, columns["zero"], columns["schedule"], columns["fsdp"], np.round(seconds, 9))
    return np.lexsort(keys) if len(seconds) else np.zeros(0, dtype=np.intp)
