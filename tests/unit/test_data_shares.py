"""Uneven shares of a global batch: which samples each part gets, in which micro-batches, and from which step on."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from phalanx.config import Job, Plan
from phalanx.data import Lane, Loader, StepBatch, Table, evaluation_batches
from phalanx.data.step_batch import BatchSplitter
from phalanx.placement.batch_split import cuts, spans

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def a_job(**options: Any) -> Job:
    unused: Any = print
    return Job(model=unused, data=unused, loss=unused, optimizer=unused, **{"batch": 8, "epochs": 2, **options})


def a_table(length: int) -> Table:
    return Table(id=torch.arange(length))


class Counting(IterableDataset[int]):
    """A stream of numbers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        return iter(range(self.length))


def ids(step: StepBatch) -> list[int]:
    return [one for part in step.parts for micro in part for one in micro.ids]


class TestSpans:
    def test_a_weight_is_shared_evenly_by_its_parts(self) -> None:
        assert spans(8, 2, (3, 1)) == ((0, 6), (6, 8))
        assert spans(8, 4, (3, 1)) == ((0, 3), (3, 6), (6, 7), (7, 8))
        assert spans(7, 4, (3, 1)) == ((0, 3), (3, 5), (5, 6), (6, 7))
        assert spans(1, 2, (3, 1)) == ((0, 1), (1, 1))

    @given(total=st.integers(0, 300), parts=st.integers(1, 12))
    def test_equal_weights_are_even_shares(self, total: int, parts: int) -> None:
        assert spans(total, parts, (1,) * parts) == spans(total, parts)

    @given(
        total=st.integers(0, 300), inner=st.integers(1, 4), each=st.lists(st.integers(1, 20), min_size=1, max_size=5)
    )
    def test_they_cover_the_batch_in_order(self, total: int, inner: int, each: list[int]) -> None:
        found = spans(total, inner * len(each), each)
        assert len(found) == inner * len(each)
        assert (found[0][0], found[-1][1]) == (0, total)
        assert all(one[1] == other[0] for one, other in pairwise(found))

    def test_parts_divide_over_weights(self) -> None:
        with pytest.raises(ValueError, match="3 parts do not divide over 2 weights"):
            spans(8, 3, (1, 1))


class TestMicroBatches:
    def test_a_part_that_talks_only_at_the_end_has_as_many_as_it_needs(self) -> None:
        fast, slow = (Lane(first=part, parts=2, weights=(3, 1), alike=False) for part in range(2))
        assert cuts(16, fast, 4) == (((0, 4), (4, 8), (8, 12)),)
        assert cuts(16, slow, 4) == (((12, 16),),)
        assert cuts(1, slow, 4) == (((0, 0),),)
        assert cuts(16, fast, None) == (((0, 12),),)

    def test_parts_of_one_weight_have_equally_many(self) -> None:
        lanes = [Lane(first=part, parts=4, weights=(3, 1), alike=False) for part in range(4)]
        assert [len(cuts(20, lane, 4)[0]) for lane in lanes] == [2, 2, 1, 1]
        # 5 samples over two parts, 2 at a time: the second has fewer, and is filled up
        first, second = (Lane(first=part, parts=4, weights=(5, 1), alike=False) for part in range(2))
        assert cuts(6, first, 2) == (((0, 2), (2, 3)),)
        assert cuts(6, second, 2) == (((3, 5), (0, 0)),)

    def test_parts_that_talk_in_each_have_equally_many_of_their_own_size(self) -> None:
        fast, slow = (Lane(first=part, parts=2, weights=(3, 1)) for part in range(2))
        assert cuts(16, fast, 4) == (((0, 4), (4, 8), (8, 12)),)
        assert cuts(16, slow, 4) == (((12, 14), (14, 15), (15, 16)),)

    @given(
        total=st.integers(1, 200),
        micro=st.none() | st.integers(1, 20),
        each=st.lists(st.integers(1, 20), min_size=1, max_size=4),
        alike=st.booleans(),
    )
    @settings(deadline=None)
    def test_each_sample_once_and_none_too_large(
        self, total: int, micro: int | None, each: list[int], alike: bool
    ) -> None:
        parts = 2 * len(each)
        lanes = [Lane(first=part, parts=parts, weights=tuple(each), alike=alike) for part in range(parts)]
        found = [cuts(total, lane, micro)[0] for lane in lanes]
        seen = [one for part in found for start, stop in part for one in range(start, stop)]
        assert seen == list(range(total))
        assert all(part for part in found)
        assert all(stop - start <= (micro or total) for part in found for start, stop in part)
        if alike:
            assert len({len(part) for part in found}) == 1

    @pytest.mark.parametrize(
        ("plan", "lane"),
        [
            ("dp=2", Lane(first=1, parts=2)),
            ("dp=2 shares=3,1", Lane(first=1, parts=2, weights=(3.0, 1.0), alike=False)),
            ("dp=2 shares=auto", Lane(first=1, parts=2, weights=(1.0, 1.0), alike=False)),
        ],
    )
    def test_the_lane_of_a_rank(self, plan: str, lane: Lane) -> None:
        assert Lane.of(Plan.parse(plan), 1) == lane

    @pytest.mark.parametrize(
        ("plan", "alike"),
        [
            ("dp=2 fsdp=2 shares=3,1", True),
            ("dp=2 fsdp=2 zero=2 shares=3,1", True),
            ("dp=2 fsdp=2 zero=1 shares=3,1", False),
            ("dp=2 tp=2 shares=3,1", False),
            ("dp=2 fsdp=2 sync=local every=4 shares=3,1", False),
        ],
    )
    def test_who_talks_in_each_micro_batch(self, plan: str, alike: bool) -> None:
        assert Lane.of(Plan.parse(plan), 0).alike is alike


class TestChanges:
    def test_from_a_step_on(self) -> None:
        dealing = BatchSplitter(Lane(first=1, parts=2, weights=(1, 1), alike=False), None, first=3)
        assert dealing.cuts(3, 8) == (((4, 8),),)
        assert dealing.next == 4
        dealing.change((3, 1), 5)
        assert dealing.cuts(4, 8) == (((4, 8),),)
        assert dealing.cuts(5, 8) == (((6, 8),),)
        assert dealing.lane(4).weights == (1, 1)
        assert dealing.lane(9).weights == (3, 1)

    def test_not_for_a_step_that_was_dealt_out(self) -> None:
        dealing = BatchSplitter(Lane(parts=2, weights=(1, 1)), None)
        dealing.cuts(4, 8)
        with pytest.raises(ValueError, match="step 4 has been dealt out already; the next is 5"):
            dealing.change((3, 1), 4)

    def test_the_last_word_counts(self) -> None:
        dealing = BatchSplitter(Lane(parts=2, weights=(1, 1)), None)
        dealing.change((3, 1), 5)
        dealing.change((1, 3), 2)
        assert [dealing.lane(step).weights for step in (1, 2, 5, 8)] == [(1, 1), (1, 3), (1, 3), (1, 3)]

    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("micro", [None, 2])
    def test_a_loader_keeps_what_it_has_read_ahead(self, workers: int, micro: int | None) -> None:
        job = a_job(workers=workers, prefetch=2 if workers else None)
        weights = (1.0, 1.0)
        loaders = [
            Loader(a_table(40), job, Lane(first=part, parts=2, weights=weights, alike=False), micro=micro)
            for part in range(2)
        ]
        even = [sorted(ids(step)) for step in Loader(a_table(40), job, Lane(), micro=None)]
        seen: list[list[int]] = []
        counts: list[tuple[int, ...]] = []
        start = 0
        for number, steps in enumerate(zip(*loaders, strict=True)):
            seen.append(sorted(one for step in steps for one in ids(step)))
            counts.append(tuple(step.here for step in steps))
            if number == 1:
                start = max(loader.next_step for loader in loaders)
                for loader in loaders:
                    loader.set_weights((3, 1), start)
        assert seen == even
        assert 2 <= start < 10
        assert counts == [(4, 4)] * start + [(6, 2)] * (10 - start)

    def test_a_stream_that_is_read_here(self) -> None:
        loader = Loader(Counting(40), a_job(shuffle=None), Lane(parts=2, weights=(1, 1)), micro=None)
        counts: list[int] = []
        for step in loader:
            counts.append(step.here)
            if step.step == 2:
                loader.set_weights((3, 1), loader.next_step)
        assert counts == [4] * 3 + [6] * 7

    def test_not_a_stream_that_others_read(self) -> None:
        loader = Loader(Counting(40), a_job(shuffle=None, workers=1), Lane(parts=2, weights=(1, 1)), micro=None)
        assert not loader.deals_here
        with pytest.raises(ValueError, match="by themselves"):
            loader.set_weights((3, 1), 5)

    def test_evaluation_sees_each_sample_once(self) -> None:
        lanes = [Lane(first=part, parts=2, weights=(3, 1), alike=False) for part in range(2)]
        seen = [
            one
            for lane in lanes
            for step in evaluation_batches(a_table(21), a_job(), lane, micro=2)
            for one in ids(step)
        ]
        assert sorted(seen) == list(range(21))
