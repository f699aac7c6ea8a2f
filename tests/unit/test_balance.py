"""Shares that follow the speed of devices: the policy, with made-up timings."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.train.uneven_shares import Balance, RankNeeds, fastest, lasting

pytestmark = pytest.mark.quick


def paces(*each: float) -> list[RankNeeds]:
    return [RankNeeds(each=one) for one in each]


class TestFastest:
    def test_by_speed(self) -> None:
        assert fastest(40, paces(1, 4)) == (32, 8)
        assert fastest(40, paces(4, 1)) == (8, 32)
        assert fastest(7, paces(1, 1)) == (4, 3)

    def test_what_does_not_depend_on_samples_counts(self) -> None:
        assert fastest(40, [RankNeeds(each=1), RankNeeds(each=1, rest=20)]) == (30, 10)

    def test_nobody_gets_nothing(self) -> None:
        assert fastest(8, paces(1, 1000)) == (7, 1)
        assert fastest(8, paces(1, 1000), least=2) == (6, 2)

    def test_nobody_gets_more_than_there_is_memory_for(self) -> None:
        assert fastest(40, [RankNeeds(each=1, most=24.7), RankNeeds(each=4)]) == (24, 16)

    def test_what_cannot_be_dealt_out(self) -> None:
        with pytest.raises(ValueError, match="3 samples over ranks"):
            fastest(3, paces(1, 1), least=2)
        with pytest.raises(ValueError, match="at most"):
            fastest(40, [RankNeeds(each=1, most=8), RankNeeds(each=1, most=8)])

    @given(
        batch=st.integers(3, 40),
        each=st.lists(st.floats(0.1, 10), min_size=3, max_size=3),
        rest=st.lists(st.floats(0, 20), min_size=3, max_size=3),
        most=st.lists(st.integers(14, 40), min_size=3, max_size=3),
    )
    def test_nothing_is_faster(self, batch: int, each: list[float], rest: list[float], most: list[int]) -> None:
        given_paces = [RankNeeds(each=a, rest=b, most=c) for a, b, c in zip(each, rest, most, strict=True)]
        found = fastest(batch, given_paces)
        assert sum(found) == batch
        least = min(
            lasting((one, other, batch - one - other), given_paces)
            for one in range(1, min(batch - 1, most[0] + 1))
            for other in range(1, min(batch - one, most[1] + 1))
            if batch - one - other <= most[2]
        )
        assert lasting(found, given_paces) <= least * (1 + 1e-9)


class TestBalance:
    def test_it_moves_to_the_speeds_at_once(self) -> None:
        balance = Balance((16, 16))
        assert balance.weigh(paces(1, 3))
        assert balance.counts == (24, 8)
        assert not balance.weigh(paces(1, 3))

    def test_noise_moves_nothing(self) -> None:
        noise = random.Random(0)
        balance = Balance((24, 8))
        moved = [balance.weigh(paces(*(one * noise.uniform(0.95, 1.05) for one in (1, 3)))) for _ in range(200)]
        assert not any(moved)

    def test_it_looks_less_often_while_nothing_changes(self) -> None:
        balance = Balance((24, 8), soon=5, late=40)
        waits = [balance.wait]
        for _ in range(5):
            balance.weigh(paces(1, 3))
            waits.append(balance.wait)
        assert waits == [5, 10, 20, 40, 40, 40]
        assert balance.weigh(paces(1, 1))
        assert balance.wait == 5

    def test_a_device_that_becomes_slow_and_recovers(self) -> None:
        balance = Balance((16, 16))
        assert not balance.weigh(paces(1, 1))
        assert balance.weigh(paces(1, 7))
        assert balance.counts == (28, 4)
        assert balance.weigh(paces(1, 1))
        assert balance.counts == (16, 16)

    def test_a_little_change_is_half_believed(self) -> None:
        balance = Balance((16, 16))
        balance.weigh(paces(1, 1))
        balance.weigh(paces(1, 1.16))
        assert balance.paces[1].each == pytest.approx(1.08)

    def test_a_rank_that_measured_nothing_leaves_all_as_it_is(self) -> None:
        balance = Balance((16, 16))
        assert not balance.weigh([RankNeeds(each=1), None])
        assert balance.counts == (16, 16)
        assert balance.paces == ()

    def test_memory_bounds_a_share_but_takes_none_away(self) -> None:
        balance = Balance((16, 16))
        assert balance.weigh([RankNeeds(each=1, most=20), RankNeeds(each=4)])
        assert balance.counts == (20, 12)
        # what it has had memory for it has memory for, whatever is free now
        assert not balance.weigh([RankNeeds(each=1, most=3), RankNeeds(each=4)])
        assert balance.counts == (20, 12)

    def test_a_fixed_cost_for_each_step_settles(self) -> None:
        """Measured is the time of a step over its samples, in which a cost of each step hides."""
        balance = Balance((32, 32))
        for _ in range(10):
            fast, slow = balance.counts
            balance.weigh(paces((1 * fast + 5) / fast, (4 * slow + 20) / slow))
        fast, slow = balance.counts
        assert math.isclose(fast + 5, 4 * slow + 20, rel_tol=0.1)
