"""Where a pipeline is cut: so that the stage with most to do has as little as can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def balanced(costs: Sequence[float], stages: int, allowed: Sequence[bool]) -> list[int] | None:
    """The first region of each stage; ``None`` where there are too few places to cut at.

    Of the ways with the least largest cost the one whose costs differ least. ``allowed[c]``: whether there can be a
    cut before region ``c``.
    """
    sums = [0.0, *accumulate(costs)]
    count = len(costs)
    # best[s][c]: (largest cost, sum of squares, cut before) of s stages made of the regions before c
    best: list[dict[int, tuple[float, float, int]]] = [{0: (0.0, 0.0, 0)}]
    for stage in range(1, stages + 1):
        row: dict[int, tuple[float, float, int]] = {}
        for end in range(stage, count + 1):
            if (end < count and not allowed[end]) or (stage == stages and end < count):
                continue
            ways = [
                (max(largest, cost := sums[end] - sums[cut]), squares + cost * cost, cut)
                for cut, (largest, squares, _) in best[-1].items()
                if cut < end
            ]
            if ways:
                row[end] = min(ways)
        best.append(row)
    if count not in best[stages]:
        return None
    cuts: list[int] = []
    end = count
    for stage in range(stages, 0, -1):
        end = best[stage][end][2]
        cuts.append(end)
    return cuts[::-1]
