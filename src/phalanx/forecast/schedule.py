"""A pipeline's step as events: each rank runs its stages' micro-batches in the order of its schedule, as inputs come.

Orders: GPipe (Huang et al. 2019), 1F1B and interleaved 1F1B (Narayanan et al. 2021), zero bubble and its V (Qi et al.
2024), DualPipe's V (DeepSeek 2025). The zero-bubble ones are run greedily: a rank takes a backward for its inputs where
one is ready, else a forward while it may hold another, else weights' gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

_GREEDY = ("zero-bubble", "zbv", "dualpipev")
_V_SHAPED = ("zbv", "dualpipev")
_FEW = 4
"""Micro-batches for each stage after which a schedule repeats itself: each more takes the slowest rank's time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """What takes how long, in seconds of one micro-batch.

    Attributes:
        schedule: its name.
        ranks: of ``pp``.
        chunks: stages on each rank.
        micros: micro-batches in a step.
        forward: by rank, of all its stages.
        inputs: the backward's half for the stage's inputs.
        weights: the half for its weights.
        send: to hand something to another rank.
    """

    schedule: str
    ranks: int
    chunks: int
    micros: int
    forward: tuple[float, ...]
    inputs: tuple[float, ...]
    weights: tuple[float, ...]
    send: float


def duration(pipeline: Pipeline) -> float:
    """Seconds from the first forward to the last backward."""
    few = _FEW * pipeline.ranks
    few += -few % pipeline.ranks
    if pipeline.micros <= 2 * few:
        return _run(pipeline, pipeline.micros)
    steady = _run(pipeline, few + pipeline.ranks)
    each = (steady - _run(pipeline, few)) / pipeline.ranks
    return steady + each * (pipeline.micros - few - pipeline.ranks)


def _run(pipeline: Pipeline, micros: int) -> float:
    if pipeline.schedule in _GREEDY and (pipeline.chunks == 1 or pipeline.schedule in _V_SHAPED):
        return _greedy(pipeline, micros)
    orders = [
        _order(pipeline.schedule, pipeline.ranks, pipeline.chunks, micros, rank) for rank in range(pipeline.ranks)
    ]
    return _ordered(pipeline, orders)


@lru_cache(maxsize=4096)
def _order(schedule: str, ranks: int, chunks: int, micros: int, rank: int) -> tuple[tuple[bool, int, int], ...]:
    """What ``rank`` does: (backward, stage, micro-batch), in order."""
    forwards = [(False, stage, micro) for stage, micro in _turns(ranks, chunks, micros, rank, range(chunks))]
    backwards = [(True, stage, micro) for stage, micro in _turns(ranks, chunks, micros, rank, range(chunks)[::-1])]
    if schedule == "gpipe":
        first = len(forwards)
    elif chunks > 1:
        first = 2 * (ranks - rank - 1) + (chunks - 1) * ranks
    else:
        first = ranks - rank - 1
    first = min(first, len(forwards))
    made = forwards[:first]
    for at, backward in enumerate(backwards):
        if first + at < len(forwards):
            made.append(forwards[first + at])
        made.append(backward)
    return tuple(made)


def _turns(ranks: int, chunks: int, micros: int, rank: int, order: Sequence[int]) -> list[tuple[int, int]]:
    """Stages and micro-batches in turn: as many micro-batches as ranks through one chunk, then through the next."""
    found: list[tuple[int, int]] = []
    for begin in range(0, micros, ranks if chunks > 1 else micros):
        group = range(begin, min(begin + (ranks if chunks > 1 else micros), micros))
        found += [(chunk * ranks + rank, micro) for chunk in order for micro in group]
    return found


def _ordered(pipeline: Pipeline, orders: Sequence[Sequence[tuple[bool, int, int]]]) -> float:
    ranks, chunks, last = pipeline.ranks, pipeline.chunks, pipeline.ranks * pipeline.chunks - 1
    ended: dict[tuple[bool, int, int], float] = {}
    clocks, places = [0.0] * ranks, [0] * ranks
    waiting = deque(range(ranks))
    idle = 0
    while waiting and idle <= len(waiting):
        rank = waiting.popleft()
        moved = False
        while places[rank] < len(orders[rank]):
            backward, stage, micro = orders[rank][places[rank]]
            if backward:
                needed = (False, stage, micro) if stage == last else (True, stage + 1, micro)
            else:
                needed = (False, stage - 1, micro)
            before = 0.0
            if backward or stage:
                if needed not in ended:
                    break
                before = ended[needed] + (pipeline.send if needed[1] != stage else 0.0)
            begin = max(clocks[rank], before)
            takes = pipeline.inputs[rank] + pipeline.weights[rank] if backward else pipeline.forward[rank]
            clocks[rank] = begin + takes / chunks
            passed = pipeline.inputs[rank] if backward and pipeline.schedule in _GREEDY else takes
            ended[backward, stage, micro] = begin + passed / chunks
            places[rank] += 1
            moved = True
        if places[rank] < len(orders[rank]):
            waiting.append(rank)
        idle = 0 if moved else idle + 1
    return max(clocks)


def _greedy(pipeline: Pipeline, micros: int) -> float:
    """Ranks choose what is ready, the earliest event first."""
    ranks, chunks = pipeline.ranks, pipeline.chunks
    stages = ranks * chunks
    held = [_holder(pipeline.schedule, ranks, stage) for stage in range(stages)]
    most = [_most(pipeline, rank) for rank in range(ranks)]
    clocks, under_way, owed = [0.0] * ranks, [0] * ranks, [0] * ranks
    ready: list[dict[tuple[int, int, int], float]] = [{} for _ in range(ranks)]
    for micro in range(micros):
        ready[held[0]][1, micro, 0] = 0.0
    left = 2 * stages * micros
    while left or any(owed):
        rank = min(
            (one for one in range(ranks) if ready[one] or owed[one]), key=lambda one: _next(one, clocks, ready, owed)
        )
        now = clocks[rank]
        may = {key: at for key, at in ready[rank].items() if key[0] == 0 or under_way[rank] < most[rank]}
        if not may and owed[rank]:
            clocks[rank] += pipeline.weights[rank] / chunks
            owed[rank] -= 1
            continue
        if not may:
            may = dict(ready[rank])
        first = min(may, key=lambda key: (max(may[key], now), key))
        if may[first] > now and owed[rank]:
            clocks[rank] += pipeline.weights[rank] / chunks
            owed[rank] -= 1
            continue
        at = ready[rank].pop(first)
        forward, micro, stage = first
        begin = max(now, at)
        takes = pipeline.forward[rank] if forward else pipeline.inputs[rank]
        clocks[rank] = end = begin + takes / chunks
        left -= 1
        under_way[rank] += 1 if forward else -1
        owed[rank] += not forward
        if forward and stage < stages - 1:
            ready[held[stage + 1]][1, micro, stage + 1] = end + (pipeline.send if held[stage + 1] != rank else 0.0)
        elif forward:
            ready[rank][0, micro, stage] = end
        elif stage:
            ready[held[stage - 1]][0, micro, stage - 1] = end + (pipeline.send if held[stage - 1] != rank else 0.0)
    return max(clocks)


def _most(pipeline: Pipeline, rank: int) -> int:
    """Forwards that ``rank`` may be ahead of its backwards: what it holds activations of."""
    ranks, chunks = pipeline.ranks, pipeline.chunks
    if pipeline.schedule in _V_SHAPED:
        return ranks * chunks
    return ranks - rank if chunks == 1 else 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1


def _next(
    rank: int, clocks: Sequence[float], ready: Sequence[dict[tuple[int, int, int], float]], owed: Sequence[int]
) -> float:
    if owed[rank] or not ready[rank]:
        return clocks[rank]
    return max(clocks[rank], min(ready[rank].values()))


def _holder(schedule: str, ranks: int, stage: int) -> int:
    if schedule in _V_SHAPED:
        return stage if stage < ranks else 2 * ranks - 1 - stage
    return stage % ranks
