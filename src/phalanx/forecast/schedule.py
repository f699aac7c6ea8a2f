"""A pipeline's step as events: each rank runs its stages' micro-batches in the order of its schedule, as inputs come.

Orders: GPipe (Huang et al. 2019), 1F1B and interleaved 1F1B (Narayanan et al. 2021), zero bubble and its V (Qi et al.
2024), DualPipe's V (DeepSeek 2025). The zero-bubble ones are run greedily: a rank takes a backward for its inputs where
one is ready, else a forward while it may hold another, else weights' gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
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


@lru_cache(maxsize=4096)
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
    stages = pipeline.ranks * pipeline.chunks
    held = [_holder(pipeline.schedule, pipeline.ranks, stage) for stage in range(stages)]
    ranks = [_Rank.of(pipeline, rank) for rank in range(pipeline.ranks)]
    ranks[held[0]].ready.update(((1, micro, 0), 0.0) for micro in range(micros))
    soon = [one.soon() for one in ranks]
    while (first := min(soon)) < _NEVER:
        at = soon.index(first)
        rank = ranks[at]
        key = rank.choice()
        if key is None:
            rank.work_off()
        else:
            rank.run(key)
            forward, micro, stage = key
            after = (1, micro, stage + 1) if forward and stage < stages - 1 else (0, micro, stage - 1 + forward)
            if after[2] >= 0:
                to = held[after[2]]
                ranks[to].ready[after] = rank.clock + (pipeline.send if to != at else 0.0)
                soon[to] = ranks[to].soon()
        soon[at] = rank.soon()
    return max(one.clock for one in ranks)


_NEVER = float("inf")


@dataclass(kw_only=True, slots=True)
class _Rank:
    """One rank as it runs; ``ready`` is (1 for a forward, micro-batch, stage) → when what it needs is there."""

    forward: float
    inputs: float
    weights: float
    most: int
    clock: float = 0.0
    under_way: int = 0
    owed: int = 0
    ready: dict[tuple[int, int, int], float] = field(default_factory=dict["tuple[int, int, int]", float])

    @classmethod
    def of(cls, pipeline: Pipeline, rank: int) -> _Rank:
        chunks = pipeline.chunks
        return cls(
            forward=pipeline.forward[rank] / chunks,
            inputs=pipeline.inputs[rank] / chunks,
            weights=pipeline.weights[rank] / chunks,
            most=_most(pipeline, rank),
        )

    def soon(self) -> float:
        """When it can do something next."""
        if self.owed:
            return self.clock
        return max(self.clock, min(self.ready.values())) if self.ready else _NEVER

    def choice(self) -> tuple[int, int, int] | None:
        """What it does next: of what is ready first, backwards before forwards; ``None`` for weights' gradients."""
        found: tuple[float, tuple[int, int, int]] | None = None
        for any_number in (False, True):
            full = self.under_way >= self.most and not any_number
            for key, at in self.ready.items():
                if key[0] and full:
                    continue
                one = (at if at > self.clock else self.clock, key)
                if found is None or one < found:
                    found = one
            if found or self.owed:
                break
        return None if found is None or (found[0] > self.clock and self.owed) else found[1]

    def run(self, key: tuple[int, int, int]) -> None:
        """A forward, or a backward for inputs."""
        forward = key[0]
        self.clock = max(self.clock, self.ready.pop(key)) + (self.forward if forward else self.inputs)
        self.under_way += 1 if forward else -1
        self.owed += not forward

    def work_off(self) -> None:
        """One of the gradients of weights that wait."""
        self.clock += self.weights
        self.owed -= 1


def _most(pipeline: Pipeline, rank: int) -> int:
    """Forwards that ``rank`` may be ahead of its backwards: what it holds activations of."""
    ranks, chunks = pipeline.ranks, pipeline.chunks
    if pipeline.schedule in _V_SHAPED:
        return ranks * chunks
    return ranks - rank if chunks == 1 else 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1


def _holder(schedule: str, ranks: int, stage: int) -> int:
    if schedule in _V_SHAPED:
        return stage if stage < ranks else 2 * ranks - 1 - stage
    return stage % ranks
