"""Orders of pipeline schedules: valid for any number of micro-batches, and as idle as the literature says."""

from __future__ import annotations

from collections import Counter

import pytest

from phalanx.config.plan import Schedule
from phalanx.parallel.pipeline.messages import messages
from phalanx.placement.schedules import Action, Order, StuckError, bubble, forwards, holders, makespan, order, timed

CASES: list[tuple[Schedule, int]] = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zero-bubble", 2),
    ("zbv", 2),
    ("dualpipev", 2),
]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("schedule", "each"), CASES)
def test_every_action_once_and_nobody_waits_for_ever(schedule: Schedule, each: int, ranks: int) -> None:
    for micros in range(1, 10):
        found = order(schedule, ranks, each, micros)
        count = Counter(action for actions in found.ranks for action in actions)
        stages = ranks * each
        assert set(count.values()) == {1}
        for stage in range(stages):
            for micro in range(micros):
                assert count[Action("F", stage, micro)] == 1
                whole, halves = count[Action("B", stage, micro)], count[Action("I", stage, micro)]
                assert whole + halves == 1
                assert count[Action("W", stage, micro)] == halves
        for rank, actions in enumerate(found.ranks):
            assert {action.stage for action in actions} == set(found.stages_of(rank))
        last = [action.micro for actions in found.ranks for action in actions if action[:2] == ("F", stages - 1)]
        assert last == list(range(micros))
        assert len(timed(found)) == sum(count.values())


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("schedule", "each"), CASES)
def test_both_ends_know_the_same_messages_in_the_same_order(schedule: Schedule, each: int, ranks: int) -> None:
    for found in (order(schedule, ranks, each, 5), forwards(schedule, ranks, each, 5)):
        lines = [messages(found, rank) for rank in range(ranks)]
        for rank, line in enumerate(lines):
            for other, here in line.items():
                assert [(message, not mine) for message, mine in here] == lines[other][rank]


def test_forwards_alone() -> None:
    for schedule, each in CASES:
        found = forwards(schedule, 3, each, 4)
        assert len(timed(found)) == 3 * each * 4


def test_stages_of_a_v_meet_on_the_last_rank() -> None:
    assert holders("zbv", 3, 6) == (0, 1, 2, 2, 1, 0)
    assert holders("interleaved", 3, 6) == (0, 1, 2, 0, 1, 2)


def test_idle_shares_are_those_of_the_papers() -> None:
    ranks, micros = 4, 8
    for schedule in ("gpipe", "1f1b"):
        assert bubble(order(schedule, ranks, 1, micros)) == pytest.approx((ranks - 1) / (micros + ranks - 1))
    assert bubble(order("interleaved", ranks, 2, micros)) == pytest.approx((ranks - 1) / (2 * micros + ranks - 1))
    assert bubble(order("zbv", ranks, 2, micros)) <= bubble(order("zero-bubble", ranks, 2, micros)) < 0.1


def test_an_order_that_never_ends_is_told() -> None:
    stuck = Order(ranks=((Action("B", 0, 0), Action("F", 0, 0)),), rank_of=(0,))
    with pytest.raises(StuckError, match="for ever: rank 0 waits with B0 of stage 0 for F0 of stage 0 of rank 0"):
        timed(stuck)
    crossed = Order(
        ranks=((Action("F", 0, 0), Action("B", 0, 0)), (Action("F", 1, 1), Action("B", 1, 0))), rank_of=(0, 1)
    )
    with pytest.raises(StuckError, match=r"rank 0 .* B0 of stage 1 of rank 1; rank 1 .* F1 of stage 0 of rank 0"):
        makespan(crossed, lambda rank, action: 1.0)
