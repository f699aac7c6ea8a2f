"""Pipeline schedules: which rank runs which stage of which micro-batch in which order, for any number of micro-batches.

==============  =====================================================================  ==========================
schedule        idea                                                                   source
==============  =====================================================================  ==========================
gpipe           all forwards, then all backwards                                       Huang et al. 2019
1f1b            a backward as soon as there is one: holds fewer activations            Narayanan et al. 2021
interleaved     several short stages a rank: less idle time, more messages             Narayanan et al. 2021
zero-bubble     the weights' half of backward fills the gaps                           Qi et al. 2024, ZB1P
zbv             the same with stages laid out as a V: rank r holds r and 2N - 1 - r    Qi et al. 2024, section 6
dualpipev       a V that pairs each forward with another micro-batch's backward        DeepSeek 2024, 2025
==============  =====================================================================  ==========================

The orders are those of ``torch.distributed.pipelining`` wherever it has one. Some schedules want a multiple of some
number of micro-batches, or at least as many as stages. An order for more than there are stays valid when those that are
not there are left out, because micro-batches do not wait for one another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from phalanx.config.plan import Plan, Schedule

Kind = Literal["F", "B", "I", "W"]

V_SHAPED: tuple[Schedule, ...] = ("zbv", "dualpipev")
"""Schedules whose way through the stages ends on the rank where it began."""


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


class Link(NamedTuple):
    """An action as part of a whole order, whose actions are numbered such that none comes before what it needs.

    Attributes:
        rank: that does it.
        action: what it does.
        before: the rank's action before it; -1 for none.
        awaits: the action of another rank whose message it needs; -1 for none.
    """

    rank: int
    action: Action
    before: int
    awaits: int


class StuckError(ValueError):
    """An order in which ranks wait for one another for ever."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What each rank does, in order.

    Attributes:
        ranks: for each rank its actions.
        rank_of: for each stage the rank that holds it.
    """

    ranks: tuple[tuple[Action, ...], ...]
    rank_of: tuple[int, ...]

    def stages_of(self, rank: int) -> list[int]:
        """The stages that ``rank`` holds, ascending."""
        return [stage for stage, holder in enumerate(self.rank_of) if holder == rank]

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """All actions of all ranks, each after what it needs.

        Raises:
            StuckError: if the order waits for something that never comes; says who waits for whom.
        """
        return _linked(self)


class Timed(NamedTuple):
    """An action, who does it, and from when to when."""

    rank: int
    action: Action
    begin: float
    end: float


@lru_cache(maxsize=256)
def order(schedule: Schedule, ranks: int, stages_per_rank: int, micros: int) -> Order:
    """The order of ``schedule`` for this many micro-batches, at least one.

    Example:
        >>> order("1f1b", 2, 1, 2).ranks[0]
        (F0 of stage 0, F1 of stage 0, B0 of stage 0, B1 of stage 0)
    """
    made = [_of_rank(schedule, ranks, stages_per_rank, micros, rank) for rank in range(ranks)]
    return Order(
        ranks=tuple(tuple(action for action in actions if action.micro < micros) for actions in made),
        rank_of=holders(schedule, ranks, ranks * stages_per_rank),
    )


def holders(schedule: Schedule, ranks: int, stages: int) -> tuple[int, ...]:
    """For each stage the rank that holds it."""
    if schedule in V_SHAPED:
        return tuple(stage if stage < ranks else 2 * ranks - 1 - stage for stage in range(stages))
    return tuple(stage % ranks for stage in range(stages))


def forwards(schedule: Schedule, ranks: int, stages_per_rank: int, micros: int) -> Order:
    """An order of forwards alone: each micro-batch follows the one before it from stage to stage."""
    stages = ranks * stages_per_rank
    rank_of = holders(schedule, ranks, stages)
    actions = [Action("F", stage, micro) for stage in range(stages) for micro in range(micros)]
    actions.sort(key=lambda action: (action.micro + action.stage, action.stage))
    return Order(
        ranks=tuple(tuple(one for one in actions if rank_of[one.stage] == rank) for rank in range(ranks)),
        rank_of=rank_of,
    )


def needs(action: Action, stages: int) -> list[Action]:
    """What must be done before ``action``, on whatever rank. ``B`` of a neighbour may be its ``I``."""
    kind, stage, micro = action
    if kind == "F":
        return [Action("F", stage - 1, micro)] if stage else []
    if kind == "W":
        return [Action("I", stage, micro)]
    return [Action("F", stage, micro), *([Action("B", stage + 1, micro)] if stage + 1 < stages else [])]


def in_halves(recompute: str, zero: int, *, recomputes: bool = False) -> bool:
    """Whether a backward may be done in halves: hooks on parameters and what is recomputed (by the model itself:
    ``recomputes``) want it whole."""
    return recompute == "none" and zero in (0, 1) and not recomputes


def cost(action: Action, *, forward: float, inputs: float, weights: float, halves: bool) -> float:
    """What ``action`` takes where a whole backward takes ``inputs + weights``.

    What cannot be done in halves is done at once: with the inputs' half, or in the first stage, whose inputs get no
    gradient, with the weights'.
    """
    if action.kind == "F":
        return forward
    if action.kind == "B":
        return inputs + weights
    if action.stage and halves:
        return inputs if action.kind == "I" else weights
    return inputs + weights if (action.kind == "I") == (action.stage > 0) else 0.0


def work(plan: Plan, action: Action) -> float:
    """How long ``action`` takes under ``plan``, in forwards of its stage: a backward two, with recomputation three."""
    half = 1.5 if plan.recompute == "full" else 1.0
    return cost(action, forward=1.0, inputs=half, weights=half, halves=in_halves(plan.recompute, plan.zero))


def timed(order: Order, cost: Callable[[Action], float] | None = None, send: float = 0.0) -> list[Timed]:
    """When each action runs if each takes ``cost`` and a message ``send``; by beginning, then rank.

    Without ``cost`` each takes one unit, and a whole backward two.

    Raises:
        StuckError: if the order waits for something that never comes.
    """
    cost = cost or (lambda action: 2.0 if action.kind == "B" else 1.0)
    found: list[Timed] = []
    for rank, action, before, awaits in order.links:
        begin = max(found[before].end if before >= 0 else 0.0, found[awaits].end + send if awaits >= 0 else 0.0)
        found.append(Timed(rank, action, begin, begin + cost(action)))
    return sorted(found, key=lambda one: (one.begin, one.end, one.rank))


def makespan(order: Order, costs: Callable[[int, Action], float], send: float = 0.0) -> float:
    """The end of the last action if each takes ``costs(rank, action)``: ``timed`` for those who want no more.

    Raises:
        StuckError: if the order waits for something that never comes.
    """
    ends: list[float] = []
    for rank, action, before, awaits in order.links:
        begin = ends[before] if before >= 0 else 0.0
        if awaits >= 0 and ends[awaits] + send > begin:
            begin = ends[awaits] + send
        ends.append(begin + costs(rank, action))
    return max(ends, default=0.0)


def bubble(order: Order, cost: Callable[[Action], float] | None = None) -> float:
    """The share of the ranks' time that they are idle, from 0 to 1, if messages take no time."""
    found = timed(order, cost)
    whole = max(one.end for one in found) * len(order.ranks)
    return 1.0 - sum(one.end - one.begin for one in found) / whole


def _linked(order: Order) -> tuple[Link, ...]:
    """Lets every rank go on for as long as it can, in turn, until all are through."""
    rank_of, stages = order.rank_of, len(order.rank_of)
    found, at, latest = list[Link](), [0] * len(order.ranks), [-1] * len(order.ranks)
    done: dict[tuple[bool, int, int], int] = {}  # forward or backward for inputs, stage, micro-batch → its number
    waiting, idle = deque(range(len(order.ranks))), 0
    while waiting and idle < len(waiting):
        rank = waiting.popleft()
        actions, first = order.ranks[rank], at[rank]
        while at[rank] < len(actions):
            kind, stage, micro = action = actions[at[rank]]
            neighbour, awaits = stage - 1 if kind == "F" else stage + 1, -1
            if kind == "W":
                ready = (False, stage, micro) in done
            else:
                ready = kind == "F" or (True, stage, micro) in done
                if 0 <= neighbour < stages:
                    number = done.get((kind == "F", neighbour, micro), -1)
                    ready = ready and number >= 0
                    awaits = number if rank_of[neighbour] != rank else -1
            if not ready:
                break
            if kind != "W":
                done[kind == "F", stage, micro] = len(found)
            found.append(Link(rank, action, latest[rank], awaits))
            latest[rank] = len(found) - 1
            at[rank] += 1
        idle = 0 if at[rank] > first else idle + 1
        if at[rank] < len(actions):
            waiting.append(rank)
    if waiting:
        raise StuckError(_told_stuck(order, at))
    return tuple(found)


def _told_stuck(order: Order, at: list[int]) -> str:
    stuck = {rank: actions[at[rank]] for rank, actions in enumerate(order.ranks) if at[rank] < len(actions)}
    done = {one for actions, count in zip(order.ranks, at, strict=True) for one in actions[:count]}
    done |= {Action("B", one.stage, one.micro) for one in done if one.kind == "I"}
    told: list[str] = []
    for rank, action in stuck.items():
        missing = next(one for one in needs(action, len(order.rank_of)) if one not in done)
        told.append(
            f"rank {rank} waits with {_name(action)} for {_name(missing)} of rank {order.rank_of[missing.stage]}"
        )
    return f"an order in which ranks wait for ever: {'; '.join(told)}"


def _name(action: Action) -> str:
    return f"{action.kind}{action.micro} of stage {action.stage}"


def _of_rank(schedule: Schedule, ranks: int, stages_per_rank: int, micros: int, rank: int) -> Iterator[Action]:
    """The actions of one rank for ``micros`` micro-batches or more."""
    if schedule in ("gpipe", "1f1b"):
        return _simple(rank, micros if schedule == "gpipe" else ranks - 1 - rank, micros)
    if schedule in ("interleaved", "zero-bubble"):
        return _interleaved(rank, ranks, stages_per_rank, micros, zero_bubble=schedule == "zero-bubble")
    return iter((_zbv if schedule == "zbv" else _dualpipev)(rank, ranks, micros))


def _simple(stage: int, ahead: int, micros: int) -> Iterator[Action]:
    """Forwards, from the ``ahead``-th on a backward after each."""
    for micro in range(micros + ahead):
        if micro < micros:
            yield Action("F", stage, micro)
        if micro >= ahead:
            yield Action("B", stage, micro - ahead)


def _interleaved(rank: int, ranks: int, chunks: int, micros: int, *, zero_bubble: bool) -> Iterator[Action]:
    """Interleaved 1F1B: Narayanan et al. 2021, section 2.2; with halves ZB1P: Qi et al. 2024, section 3.

    Micro-batches go in rounds through one stage of the rank after the other. A round has as many as there are ranks;
    where they do not come out even, one more, and the last round lacks some.
    """
    rounds = max(1, micros // ranks)
    each = -(-micros // rounds)
    count = rounds * each * chunks
    ahead = min((chunks - 1) * each + (1 if zero_bubble else 2) * (ranks - 1 - rank), count)

    def turn(kind: Kind, index: int) -> Action:
        chunk, micro = index // each % chunks, index // (each * chunks) * each + index % each
        return Action(kind, (chunk if kind == "F" else chunks - 1 - chunk) * ranks + rank, micro)

    for index in range(ahead):
        yield turn("F", index)
    for index in range(count):
        if ahead + index < count:
            yield turn("F", ahead + index)
        yield turn("I" if zero_bubble else "B", index)
        if zero_bubble and index >= rank:
            yield turn("W", index - rank)
    if zero_bubble:
        for index in range(max(count - rank, 0), count):
            yield turn("W", index)


class _Sequence:
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
        """The oldest of these, if any."""
        for oldest in self.owes(stage)[:1]:
            self._owed.remove(oldest)
            self.actions.append(oldest)


def _zbv(rank: int, ranks: int, micros: int) -> list[Action]:
    """Qi et al. 2024, section 6: a V of two stages a rank, every backward in halves."""
    at = _Sequence((rank, 2 * ranks - 1 - rank))
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


def _dualpipev(rank: int, ranks: int, micros: int) -> list[Action]:
    """DeepSeek's DualPipe (2024, section 3.2.1) cut in half to a V: eight phases, named in its published code."""
    at = _Sequence((rank, 2 * ranks - 1 - rank))
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
