"""Where a pipeline is cut: so that the stage with most to do has as little as can be; and what its ranks hold then."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from phalanx.config.fields import Schedule
from phalanx.config.model_costs import ModelPart, flops
from phalanx.placement.schedules import holders


def balanced(costs: Sequence[float], stages: int, allowed: Sequence[bool]) -> list[int] | None:
    """The first region of each stage; ``None`` where there are too few places to cut at.

    Of the ways with the least largest cost the one whose costs differ least. ``allowed[c]``: whether there can be a
    cut before region ``c``.
    """
    count = len(costs)
    if not 0 < stages <= count:
        return None
    sums = np.array([0.0, *accumulate(costs)])
    # cost[end, cut]: of a stage made of the regions from cut to before end; endless where it would be empty
    cost = np.where(np.tri(count + 1, k=-1, dtype=bool), sums[:, None] - sums[None, :], np.inf)
    cost[[at for at in range(1, count) if not allowed[at]]] = np.inf
    square = cost * cost
    largest, squares = np.full(count + 1, np.inf), np.full(count + 1, np.inf)
    largest[0] = squares[0] = 0.0
    best_cuts: list[npt.NDArray[np.intp]] = []
    for _ in range(stages):  # one stage more of the regions before each end: least largest cost, then squares, then cut
        most, total = np.maximum(cost, largest), square + squares
        largest = most.min(axis=1)
        total[most > largest[:, None]] = np.inf
        best_cuts.append(total.argmin(axis=1))
        squares = total.min(axis=1)
    if np.isinf(largest[count]):
        return None
    cuts: list[int] = []
    end = count
    for row in reversed(best_cuts):
        end = int(row[end])
        cuts.append(end)
    return cuts[::-1]


def on_ranks(
    parts: Sequence[ModelPart], length: int, schedule: Schedule, ranks: int, stages: int
) -> tuple[tuple[int, ...], ...]:
    """For each rank of a pipeline with so many ``stages`` on each, how many of each part it holds.

    Parts are as far apart as cuts can be; a model with fewer of them than stages leaves some empty.
    """
    costs = tuple(sum(flops(one, 1.0, length) for one in part.forward if not one.again) for part in parts)
    return _on_ranks(tuple(part.count for part in parts), costs, holders(schedule, ranks, ranks * stages))


def sends(schedule: Schedule, ranks: int, stages: int, rank: int) -> tuple[int, int]:
    """Messages to other ranks that ``rank``, with so many ``stages`` on each, sends for one micro-batch.

    Outputs to the stages after its own, and gradients to those before; where a V turns, two stages are on one rank.
    """
    rank_of = holders(schedule, ranks, ranks * stages)
    forward = sum(one == rank != after for one, after in pairwise(rank_of))
    return forward, sum(before != rank == one for before, one in pairwise(rank_of))


@lru_cache(maxsize=1024)
def _on_ranks(
    counts: tuple[int, ...], costs: tuple[float, ...], rank_of: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    row = [at for at, count in enumerate(counts) for _ in range(count)]
    stages = len(rank_of)
    starts = balanced([costs[at] for at in row], stages, [True] * len(row))
    starts = starts or [len(row) * stage // stages for stage in range(stages)]
    every = [[0] * len(counts) for _ in range(max(rank_of) + 1)]
    for stage, (first, end) in enumerate(pairwise([*starts, len(row)])):
        for at in row[first:end]:
            every[rank_of[stage]][at] += 1
    return tuple(tuple(rank) for rank in every)
