"""Which rank runs which stage of which micro-batch when: torch's pipeline schedules, for any number of micro-batches.

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

Some schedules want a multiple of some number of micro-batches, or at least as many as stages. An order for more than
there are stays valid when those that are not there are left out, because micro-batches do not wait for one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

from phalanx.spec.plan import Plan, Schedule

Kind = Literal["F", "B", "I", "W"]

_V_SHAPED = ("zbv", "dualpipev")


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


@dataclass(frozen=True, kw_only=True, slots=True)
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


class Timed(NamedTuple):
    """An action, who does it, and from when to when."""

    rank: int
    action: Action
    begin: float
    end: float


@cache
def order(schedule: Schedule, ranks: int, stages_per_rank: int, micros: int) -> Order:
    """The order of ``schedule`` for this many micro-batches, at least one.

    Example:
        >>> order("1f1b", 2, 1, 2).ranks[0]
        (F0 of stage 0, F1 of stage 0, B0 of stage 0, B1 of stage 0)
    """
    stages = ranks * stages_per_rank
    made: list[tuple[Action, ...]] = []
    for rank in range(ranks):
        if schedule in ("gpipe", "1f1b"):  # torch counts the last rank's micro-batches from one, and is slow to import
            actions = _simple(rank, stages - 1 - rank if schedule == "1f1b" else micros, micros)
        else:
            actions = _flat(_of_torch(schedule, rank, ranks, stages_per_rank, micros))
        made.append(tuple(action for action in actions if action.micro < micros))
        missing = stages_per_rank * micros - sum(action.kind == "F" for action in made[rank])
        assert missing == 0, f"{schedule}: rank {rank} lacks {missing} forwards"
    return Order(ranks=tuple(made), rank_of=holders(schedule, ranks, stages))


def in_halves(plan: Plan) -> bool:
    """Whether a backward may be done in halves: hooks on parameters and recomputed activations want it whole."""
    return plan.recompute == "none" and plan.zero in (0, 1)


def work(plan: Plan, action: Action) -> float:
    """How long ``action`` takes under ``plan``, in forwards of its stage: a backward two, with recomputation three.

    What cannot be done in halves is done at once: with the inputs' half, or in the first stage, whose inputs get no
    gradient, with the weights'.
    """
    backward = 3.0 if plan.recompute == "full" else 2.0
    if action.kind == "F":
        return 1.0
    if action.kind == "B":
        return backward
    if action.stage and in_halves(plan):
        return backward / 2
    return backward if (action.kind == "I") == (action.stage > 0) else 0.0


def holders(schedule: Schedule, ranks: int, stages: int) -> tuple[int, ...]:
    """For each stage the rank that holds it."""
    if schedule in _V_SHAPED:
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


def timed(order: Order, cost: Callable[[Action], float] | None = None) -> list[Timed]:
    """When each action runs if each takes ``cost`` and messages take no time; by beginning, then rank.

    Without ``cost`` each takes one unit, and a whole backward two.

    Raises:
        ValueError: if the order waits for something that never comes.
    """
    cost = cost or (lambda action: 2.0 if action.kind == "B" else 1.0)
    stages, done, found = len(order.rank_of), dict[Action, float](), list[Timed]()
    at, free = [0] * len(order.ranks), [0.0] * len(order.ranks)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(order.ranks):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                before = needs(action, stages)
                if any(one not in done for one in before):
                    break
                begin = max([free[rank], *(done[one] for one in before)])
                end = free[rank] = begin + cost(action)
                found.append(Timed(rank, action, begin, end))
                done[action] = end
                if action.kind in "BI":  # whoever waits for the inputs' gradient takes either
                    done[Action("B", action.stage, action.micro)] = end
                at[rank] += 1
                moved = True
    stuck = {rank: actions[at[rank]] for rank, actions in enumerate(order.ranks) if at[rank] < len(actions)}
    if stuck:
        raise ValueError(f"an order in which ranks wait for ever: {stuck}")
    return sorted(found, key=lambda one: (one.begin, one.end, one.rank))


def bubble(order: Order, cost: Callable[[Action], float] | None = None) -> float:
    """The share of the ranks' time that they are idle, from 0 to 1, if messages take no time."""
    found = timed(order, cost)
    whole = max(one.end for one in found) * len(order.ranks)
    return 1.0 - sum(one.end - one.begin for one in found) / whole


def _flat(actions: Sequence[Any]) -> Iterator[Action]:
    for action in actions:
        if action is None:
            continue
        kind = action.computation_type.value
        if kind == "OVERLAP_F_B":
            yield from _flat(action.sub_actions)
        elif kind in ("F", "B", "I", "W"):
            yield Action(kind, action.stage_index, action.microbatch_index)


def _simple(stage: int, ahead: int, micros: int) -> Iterator[Action]:
    """Forwards, from the ``ahead``-th on a backward after each."""
    for micro in range(micros + ahead):
        if micro < micros:
            yield Action("F", stage, micro)
        if micro >= ahead:
            yield Action("B", stage, micro - ahead)


def _of_torch(schedule: Schedule, rank: int, ranks: int, stages_per_rank: int, micros: int) -> Sequence[Any]:
    """torch's own order of one rank, for ``micros`` micro-batches or more."""
    from torch.distributed.pipelining import schedules as torchs

    stages = ranks * stages_per_rank
    kinds: dict[Schedule, Any] = {
        "interleaved": torchs.ScheduleInterleaved1F1B,
        "zero-bubble": torchs.ScheduleInterleavedZeroBubble,
        "zbv": torchs.ScheduleZBVZeroBubble,
        "dualpipev": torchs.ScheduleDualPipeV,
    }
    kind = kinds[schedule]
    # What the methods that compute an order read; a whole schedule would want stages with modules and a process group.
    it: Any = kind.__new__(kind)
    it._n_microbatches, it._num_stages, it.num_stages = micros, stages, stages
    it.pp_group_size, it.n_local_stages = ranks, stages_per_rank
    if schedule == "dualpipev":
        it._n_microbatches = max(micros, stages)
    if schedule in ("interleaved", "zero-bubble"):
        it.number_of_rounds = max(1, micros // ranks)
        it.microbatches_per_round = -(-micros // it.number_of_rounds)
        it._n_microbatches = it.number_of_rounds * it.microbatches_per_round
    return it._calculate_single_rank_operations(rank)
