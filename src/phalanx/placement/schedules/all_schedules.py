"""Pipeline schedules: each rank's order of stages and micro-batches, for any number of micro-batches.

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
number of micro-batches, or at least as many as stages. An order for more micro-batches stays valid when the additional
ones are left out, because micro-batches do not wait for one another.
"""

from __future__ import annotations

from functools import lru_cache

from phalanx.config.fields import Schedule
from phalanx.placement.schedules.interleaved import INTERLEAVED, ZERO_BUBBLE
from phalanx.placement.schedules.order import Action, Order, PipelineSchedule
from phalanx.placement.schedules.schedule_1f1b import GPIPE, ONE_F_ONE_B
from phalanx.placement.schedules.zbv import DUALPIPEV, ZBV

SCHEDULES: dict[Schedule, PipelineSchedule] = {
    one.name: one for one in (GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE, ZBV, DUALPIPEV)
}


@lru_cache(maxsize=256)
def order(schedule: Schedule, ranks: int, stages_per_rank: int, micros: int) -> Order:
    """Return the order of ``schedule`` for this many micro-batches, at least one.

    Example:
        >>> order("1f1b", 2, 1, 2).ranks[0]
        (F0 of stage 0, F1 of stage 0, B0 of stage 0, B1 of stage 0)
    """
    made = [SCHEDULES[schedule].actions(rank, ranks, stages_per_rank, micros) for rank in range(ranks)]
    return Order(
        ranks=tuple(tuple(action for action in actions if action.micro < micros) for actions in made),
        rank_of=holders(schedule, ranks, ranks * stages_per_rank),
    )


def holders(schedule: Schedule, ranks: int, stages: int) -> tuple[int, ...]:
    """Return for each stage the rank that holds it."""
    if SCHEDULES[schedule].v_shaped:
        return tuple(stage if stage < ranks else 2 * ranks - 1 - stage for stage in range(stages))
    return tuple(stage % ranks for stage in range(stages))


def forwards(schedule: Schedule, ranks: int, stages_per_rank: int, micros: int) -> Order:
    """Return an order of forwards alone: micro-batches follow each other from stage to stage."""
    stages = ranks * stages_per_rank
    rank_of = holders(schedule, ranks, stages)
    actions = [Action("F", stage, micro) for stage in range(stages) for micro in range(micros)]
    actions.sort(key=lambda action: (action.micro + action.stage, action.stage))
    return Order(
        ranks=tuple(tuple(one for one in actions if rank_of[one.stage] == rank) for rank in range(ranks)),
        rank_of=rank_of,
    )
