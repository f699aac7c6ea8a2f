"""Pipeline schedules: the order of each rank's actions, their dependencies, and their times."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Literal, NamedTuple

from phalanx.config.fields import Schedule as Name
from phalanx.config.plan import Plan

Kind = Literal["F", "B", "I", "W"]

Filling = Literal["two phases", "one way", "a stage at a time", "weights"]
"""What the ranks that wait for the first or the last micro-batch do meanwhile, by which forecasts tell how long a step
takes: they wait for all forwards and then for all backwards; for one way through the ranks and back; for one way
through a stage of each; or they compute weights' gradients.
"""


class Action(NamedTuple):
    """One action of a rank."""

    kind: Kind  # ``F`` forward; ``B`` backward, or its halves: ``I`` for the stage's inputs and ``W`` for its weights
    stage: int  # of the pipeline
    micro: int  # which micro-batch


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSchedule:
    """One schedule. A new one is a file with one of these, its name in ``config.fields`` and its line in a table."""

    name: Name  # as plans say it
    # ``(rank, ranks, stages_per_rank, micros)`` → the actions of that rank in order, for so many micro-batches or more:
    # those of micro-batches that are not there are left out
    actions: Callable[[int, int, int, int], Iterable[Action]]
    # ``(place, ranks, stages_per_rank, micros, ahead)`` → micro-batches, of the whole rank, that the rank at ``place``
    # holds between forward and backward when it holds most; ``ahead``: how far zero-bubble schedules run ahead of 1F1B
    in_flight: Callable[[float, int, int, int, float], float]
    filling: Filling  # see ``Filling``
    v_shaped: bool = False  # whether the way through the stages is a V, which ends on the rank where it began
    in_halves: bool = False  # whether backwards are done in two passes
    searched: tuple[int, ...] = ()  # stages on a rank with which the planner tries it, fewest first


class Links(NamedTuple):
    """The actions of a whole order, numbered so that each follows its dependencies: a list for each column."""

    action: list[Action]
    before: list[int]  # the rank's action before it; -1 for none
    awaits: list[int]  # the action of another rank whose message it needs; -1 for none


class StuckError(ValueError):
    """An order in which ranks wait for one another for ever."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """Each rank's actions in order."""

    ranks: tuple[tuple[Action, ...], ...]  # for each rank its actions
    rank_of: tuple[int, ...]  # for each stage the rank that holds it

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that ``rank`` holds, ascending."""
        return [stage for stage, holder in enumerate(self.rank_of) if holder == rank]

    @cached_property
    def links(self) -> Links:
        """Return all actions of all ranks, each after its dependencies.

        Raises:
            StuckError: if the order waits for an action that never comes; names the waiting ranks.
        """
        return _linked(self)


class Timed(NamedTuple):
    """An action, its rank, and its begin and end."""

    rank: int
    action: Action
    begin: float
    end: float


def needs(action: Action, stages: int) -> list[Action]:
    """Return the actions required before ``action``, on any rank. ``B`` of a neighbour may be its ``I``."""
    kind, stage, micro = action
    if kind == "F":
        return [Action("F", stage - 1, micro)] if stage else []
    if kind == "W":
        return [Action("I", stage, micro)]
    return [Action("F", stage, micro), *([Action("B", stage + 1, micro)] if stage + 1 < stages else [])]


def in_halves(recompute: str, zero: int, *, compiles: bool = False, recomputes: bool = False) -> bool:
    """Return True if a backward may be done in halves.

    Hooks on parameters, recomputation (also by the model itself: ``recomputes``) and compiled blocks need it whole.
    """
    return recompute == "none" and zero in (0, 1) and not recomputes and not compiles


def cost(action: Action, *, forward: float, inputs: float, weights: float, halves: bool) -> float:
    """Return the cost of ``action``, if a whole backward costs ``inputs + weights``.

    A backward without halves is done at once: with the inputs' half, or in the first stage, whose inputs get no
    gradient, with the weights'.
    """
    if action.kind == "F":
        return forward
    if action.kind == "B":
        return inputs + weights
    if action.stage and halves:
        return inputs if action.kind == "I" else weights
    return inputs + weights if (action.kind == "I") == (action.stage > 0) else 0.0


def work(plan: Plan, action: Action, *, recomputes: bool = False) -> float:
    """Return the duration of ``action`` under ``plan``, in forwards of its stage: a backward 2, with recomputation 3.

    ``recomputes``: whether the model recomputes activations by itself.
    """
    half = 1.5 if plan.recompute == "full" or recomputes else 1.0
    halves = in_halves(plan.recompute, plan.zero, compiles=plan.compile, recomputes=recomputes)
    return cost(action, forward=1.0, inputs=half, weights=half, halves=halves)


def timed(order: Order, cost: Callable[[Action], float] | None = None) -> list[Timed]:
    """Return the time of each action if each takes ``cost`` and messages no time; by begin, then rank.

    Without ``cost`` each takes one unit, and a whole backward two.

    Raises:
        StuckError: if the order waits for an action that never comes.
    """
    links, cost = order.links, cost or (lambda action: 2.0 if action.kind == "B" else 1.0)
    takes = [cost(action) for action in links.action]
    every = zip(links.action, takes, ends(order, takes), strict=True)
    found = [Timed(order.rank_of[action.stage], action, end - taken, end) for action, taken, end in every]
    return sorted(found, key=lambda one: (one.begin, one.end, one.rank))


def ends(order: Order, takes: Iterable[float]) -> list[float]:
    """Return the end of each action, by its number in ``order.links``, if actions take ``takes`` and messages no time.

    Raises:
        StuckError: if the order waits for an action that never comes.
    """
    links = order.links
    found = [0.0] * (len(links.action) + 1)  # the last one, where -1 points, is the end of what is not there
    for number, (before, awaits, cost) in enumerate(zip(links.before, links.awaits, takes, strict=True)):
        begin, other = found[before], found[awaits]
        found[number] = (other if other > begin else begin) + cost
    return found[:-1]


def bubble(order: Order, cost: Callable[[Action], float] | None = None) -> float:
    """Return the idle share of the ranks' time, from 0 to 1, if messages take no time."""
    found = timed(order, cost)
    whole = max(one.end for one in found) * len(order.ranks)
    return 1.0 - sum(one.end - one.begin for one in found) / whole


def _linked(order: Order) -> Links:
    rank_of, stages = order.rank_of, len(order.rank_of)
    micros = 1 + max((action.micro for actions in order.ranks for action in actions), default=-1)
    # for each stage and micro-batch the number of its forward, and of its backward for the inputs; -1 before it is done
    forward, backward = ([[-1] * micros for _ in range(stages)] for _ in range(2))
    links, at, latest = Links([], [], []), [0] * len(order.ranks), [-1] * len(order.ranks)
    waiting, idle, number = deque(range(len(order.ranks))), 0, 0
    while waiting and idle < len(waiting):
        rank, first = waiting.popleft(), number
        for action in islice(order.ranks[rank], at[rank], None):
            kind, stage, micro = action
            ways, neighbour = (forward, stage - 1) if kind == "F" else (backward, stage + 1)
            there = kind != "W" and 0 <= neighbour < stages
            awaits = ways[neighbour][micro] if there else -1
            done = kind == "F" or (backward if kind == "W" else forward)[stage][micro] >= 0
            if not done or (there and awaits < 0):
                break
            if kind != "W":
                ways[stage][micro] = number
            links.action.append(action)
            links.before.append(latest[rank])
            links.awaits.append(awaits if there and rank_of[neighbour] != rank else -1)
            latest[rank] = number
            number += 1
        at[rank] += number - first
        idle = 0 if number > first else idle + 1
        if at[rank] < len(order.ranks[rank]):
            waiting.append(rank)
    if waiting:
        raise StuckError(_told_stuck(order, at))
    return links


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
