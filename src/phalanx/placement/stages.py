"""Cuts of a pipeline with the smallest largest stage, and the parts on its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from phalanx.config.fields import Schedule
from phalanx.config.model_costs import ModelPart, flops
from phalanx.placement.schedules import holders


def balanced(costs: Sequence[float], stages: int, allowed: Sequence[bool]) -> list[int] | None:
    """Return the first region of each stage; ``None`` if there are too few places to cut at.

    Among the cuts with the least largest cost it takes the most even one. ``allowed[c]``: whether a cut before region
    ``c`` is possible.
    """
    table = [_row(tuple(costs), tuple(allowed), stage) for stage in range(stages + 1)]
    cuts, end = list[int](), len(costs)
    if end not in table[stages]:
        return None
    for stage in range(stages, 0, -1):
        end = table[stage][end][2]
        cuts.append(end)
    return cuts[::-1]


@lru_cache(maxsize=1024)
def _row(costs: tuple[float, ...], allowed: tuple[bool, ...], stages: int) -> dict[int, tuple[float, float, int]]:
    """Map each end to largest cost, sum of squares and last cut of so many stages made of the regions before it."""
    if stages == 0:
        return {0: (0.0, 0.0, 0)}
    sums = [0.0, *accumulate(costs)]
    row: dict[int, tuple[float, float, int]] = {}
    for end in range(stages, len(costs) + 1):
        if end < len(costs) and not allowed[end]:
            continue
        ways = [
            (max(largest, cost := sums[end] - sums[cut]), squares + cost * cost, cut)
            for cut, (largest, squares, _) in _row(costs, allowed, stages - 1).items()
            if cut < end
        ]
        if ways:
            row[end] = min(ways)
    return row


def on_ranks(
    parts: Sequence[ModelPart], length: int, schedule: Schedule, ranks: int, stages: int
) -> tuple[tuple[int, ...], ...]:
    """Return counts of each part on each rank of a pipeline with this many ``stages`` a rank.

    Parts are the finest cuts; a model with fewer parts than stages leaves some stages empty.
    """
    costs = tuple(sum(flops(one, 1.0, length) for one in part.forward if not one.again) for part in parts)
    return _on_ranks(tuple(part.count for part in parts), costs, holders(schedule, ranks, ranks * stages))


def sends(schedule: Schedule, ranks: int, stages: int, rank: int) -> tuple[int, int]:
    """Return messages of ``rank`` to other ranks for one micro-batch, with this many ``stages`` a rank.

    Outputs go to later stages, and gradients to earlier ones. At the turn of a V, two stages are on one rank.
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
