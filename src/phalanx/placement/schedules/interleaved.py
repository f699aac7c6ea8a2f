"""Interleaved 1F1B: several short stages a rank, less idle time (Narayanan et al. 2021, section 2.2.2); ZB1P.

Zero bubble, ZB1P: the weights' half of backward fills the gaps (Qi et al. 2024, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.placement.schedules.order import Action, Kind, PipelineSchedule


def round_of(ranks: int, micros: int) -> int:
    """Return the micro-batches in one round: the number of ranks, or more if they do not divide evenly."""
    return -(-micros // max(1, micros // ranks))


def rounds(rank: int, ranks: int, chunks: int, micros: int, *, zero_bubble: bool) -> Iterator[Action]:
    """Yield interleaved 1F1B: Narayanan et al. 2021, section 2.2; with halves ZB1P: Qi et al. 2024, section 3.

    Micro-batches go in rounds through one stage of the rank after the other. A round has as many as there are ranks. If
    they do not divide evenly, one more, and the last round lacks some.
    """
    each = round_of(ranks, micros)
    count = max(1, micros // ranks) * each * chunks
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


def _actions(rank: int, ranks: int, stages: int, micros: int) -> Iterator[Action]:
    return rounds(rank, ranks, stages, micros, zero_bubble=False)


def _in_flight(place: float, ranks: int, stages: int, micros: int, ahead: float) -> float:
    warm_up = (stages - 1) * round_of(ranks, micros) + 2 * (ranks - 1 - place)
    return min((warm_up + 1) / stages, micros)


INTERLEAVED = PipelineSchedule(
    name="interleaved", actions=_actions, in_flight=_in_flight, filling="a stage at a time", searched=(2, 4)
)


def _zero_bubble_actions(rank: int, ranks: int, stages: int, micros: int) -> Iterator[Action]:
    return rounds(rank, ranks, stages, micros, zero_bubble=True)


def _zero_bubble_in_flight(place: float, ranks: int, stages: int, micros: int, ahead: float) -> float:
    """Count the warm-up, the forward after it, and inputs of waiting weight backwards.

    With one stage a rank this is table 1 of the paper: ZB-H1 holds as much as 1F1B's first rank, ZB-H2 (``ahead`` = 2)
    twice as much.
    """
    warm_up = (stages - 1) * round_of(ranks, micros) + ranks
    return min(warm_up / stages + (ahead - 1) * (ranks - 1), micros)


ZERO_BUBBLE = PipelineSchedule(
    name="zero-bubble",
    actions=_zero_bubble_actions,
    in_flight=_zero_bubble_in_flight,
    filling="weights",
    in_halves=True,
    searched=(2,),
)
