"""Shares of a global batch: how it is cut over ranks, micro-batches and by speed; what is priced is what is listed."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_profiles import transformer
from torch.utils.data import IterableDataset

from law_rows import in_one_test
from phalanx.config import Cluster, Job, Plan
from phalanx.data import Loader, StepBatch, Table
from phalanx.data.step_batch import BatchSplitter
from phalanx.forecast import PHALANX, Work, forecast
from phalanx.forecast.kernels import widths
from phalanx.forecast.layouts import Layouts
from phalanx.hardware import cluster
from phalanx.placement.batch_split import Lane, cuts, micro_batches, share, spans
from phalanx.placement.collective_bytes import Exchange, MeshSizes
from phalanx.placement.step_traffic import step_traffic
from phalanx.report.show import planned
from phalanx.report.summary import slowest_rank
from phalanx.train.uneven_shares import Balance, RankNeeds, fastest, lasting

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


@pytest.mark.quick
class TestShare:
    @given(total=st.integers(0, 10_000), parts=st.integers(1, 300))
    def test_shares_tile_the_batch(self, total: int, parts: int) -> None:
        shares = [share(total, part, parts) for part in range(parts)]
        assert shares[0][0] == 0
        assert shares[-1][1] == total
        assert all(before[1] == after[0] for before, after in itertools.pairwise(shares))
        sizes = [stop - start for start, stop in shares]
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.quick
class TestCuts:
    @given(total=st.integers(1, 300), parts=st.integers(1, 40), micro=st.one_of(st.none(), st.integers(1, 50)))
    def test_each_sample_once_and_counts_line_up(self, total: int, parts: int, micro: int | None) -> None:
        lanes = [cuts(total, Lane(first=part, count=1, parts=parts), micro)[0] for part in range(parts)]
        assert len({len(pieces) for pieces in lanes}) == 1
        seen = [sample for pieces in lanes for start, stop in pieces for sample in range(start, stop)]
        assert seen == list(range(total))
        assert micro is None or all(stop - start <= micro for pieces in lanes for start, stop in pieces)
        assert cuts(total, Lane(first=0, count=parts, parts=parts), micro) == tuple(lanes)


@pytest.mark.quick
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


@pytest.mark.quick
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
        assert [one for part in found for start, stop in part for one in range(start, stop)] == list(range(total))
        assert all(part for part in found)
        assert all(stop - start <= (micro or total) for part in found for start, stop in part)
        if alike:
            assert len({len(part) for part in found}) == 1

    def test_the_lane_of_a_rank(self) -> None:
        for weights, lane in {
            "": Lane(first=1, parts=2),
            " shares=3,1": Lane(first=1, parts=2, weights=(3.0, 1.0), alike=False),
            " shares=auto": Lane(first=1, parts=2, weights=(1.0, 1.0), alike=False),
        }.items():
            assert Lane.of(Plan.parse(f"dp=2{weights}"), 1) == lane
        for rest, alike in {
            "fsdp=2": True,
            "fsdp=2 zero=2": True,
            "fsdp=2 zero=1": False,
            "tp=2": False,
            "fsdp=2 sync=local every=4": False,
        }.items():
            assert Lane.of(Plan.parse(f"dp=2 {rest} shares=3,1"), 0).alike is alike, rest


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
        with pytest.raises(ValueError, match="the next is 5"):
            dealing.change((3, 1), 4)

    def test_the_last_word_counts(self) -> None:
        dealing = BatchSplitter(Lane(parts=2, weights=(1, 1)), None)
        dealing.change((3, 1), 5)
        dealing.change((1, 3), 2)
        assert [dealing.lane(step).weights for step in (1, 2, 5, 8)] == [(1, 1), (1, 3), (1, 3), (1, 3)]

    @pytest.mark.parametrize(("workers", "micro"), [(0, 2), (2, None)])
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

    def test_not_a_stream_that_others_read(self) -> None:
        loader = Loader(Counting(40), a_job(shuffle=None, workers=1), Lane(parts=2, weights=(1, 1)), micro=None)
        assert not loader.deals_here
        with pytest.raises(ValueError, match="by themselves"):
            loader.set_weights((3, 1), 5)


@pytest.mark.quick
@given(
    batch=st.integers(1, 70),
    dp=st.integers(1, 5),
    fsdp=st.integers(1, 3),
    micro=st.one_of(st.none(), st.integers(1, 20)),
)
@settings(deadline=None)
def test_the_micro_batches_of_a_rank_are_counted_once(batch: int, dp: int, fsdp: int, micro: int | None) -> None:
    plan = Plan(pp=2, dp=dp, fsdp=fsdp, micro=micro)
    batch = max(batch, plan.replicas)
    found = {len(part) for rank in range(plan.world_size) for part in cuts(batch, Lane.of(plan, rank), micro)}
    drawn = planned(plan, batch, None)
    assert drawn is not None
    assert found == {drawn.micros}
    assert found == {MeshSizes.of(plan, batch).micros}
    assert found == set(Layouts.of([plan], batch, 16).micros.tolist())


@pytest.mark.quick
def test_the_largest_share_is_what_counts() -> None:
    assert micro_batches(Plan.parse("dp=2 micro=4"), 9) == 2  # 5 samples, and 4
    assert micro_batches(Plan.parse("dp=2 micro=2 shares=3,1"), 8) == 3


def paces(*each: float) -> list[RankNeeds]:
    return [RankNeeds(each=one) for one in each]


@pytest.mark.quick
class TestFastest:
    def test_nobody_gets_nothing(self) -> None:
        assert fastest(8, paces(1, 1000)) == (7, 1)
        assert fastest(8, paces(1, 1000), least=2) == (6, 2)

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


@pytest.mark.quick
class TestBalance:
    def test_noise_moves_nothing(self) -> None:
        noise = random.Random(0)
        balance = Balance((24, 8))
        moved = [balance.weigh(paces(*(one * noise.uniform(0.95, 1.05) for one in (1, 3)))) for _ in range(200)]
        assert not any(moved)

    def test_a_device_that_becomes_slow_and_recovers(self) -> None:
        balance = Balance((16, 16))
        assert not balance.weigh(paces(1, 1))
        assert balance.weigh(paces(1, 7))
        assert balance.counts == (28, 4)
        assert balance.weigh(paces(1, 1))
        assert balance.counts == (16, 16)

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


KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send")
WORK = Work(profile=transformer(layers=4, width=64, heads=4, vocabulary=100), batch=16, norm=True)
UNPRICED = {"the loss and its count", "replicas' fingerprints"}  # in what every step takes at least
PLANS = (
    *("dp=2", "dp=4 micro=2", "fsdp=2 zero=1 micro=2", "fsdp=2 micro=2", "dp=2 fsdp=2 zero=2 micro=2"),
    *("fsdp=2 zero=1 precision=fp16", "tp=2 micro=4", "tp=2 sequence=true recompute=selective precision=bf16"),
    *("cp=2 micro=4", "cp=2 attention=alltoall recompute=selective", "fsdp=2 tp=2 zero=1 sequence=true"),
    *("fsdp=2 cp=2 zero=2 micro=2", "cp=2 tp=2 recompute=full", "dp=2 ep=2"),
)


def per_byte(kind: str, devices: int = 8) -> Cluster:
    """GPUs on which each byte of an exchange of this ``kind`` takes a second, and no other exchange any time."""
    lines = {f"{one}.{ranks}.{end}": 0.0 for one in KINDS for ranks in (2, 4) for end in ("start", "byte")}
    lines |= {f"{kind}.{ranks}.byte": 1.0 for ranks in (2, 4)}
    known = cluster(f"{devices}xA100")
    group = known.groups[0]
    device = replace(group.device, measured={**group.device.measured, **lines})
    return replace(known, groups=(replace(group, device=device),))


def listed(plan: Plan, kind: str, rank: int) -> float:
    """Bytes of all exchanges of that kind; a ring takes what a gather does."""
    wide = widths(PHALANX, plan.precision, np.array(float(plan.zero)))

    def bytes_of(one: Exchange) -> float:
        there = {"ring": "all-gather"}.get(one.kind, one.kind) == kind and one.why not in UNPRICED
        return float(one.size * one.times) if there else 0.0

    return sum(bytes_of(one) for one in step_traffic(WORK.profile, plan, WORK.batch, rank, wide))


@in_one_test("text", PLANS)
def test_all_that_is_listed_is_priced_and_nothing_else(text: str) -> None:
    plan = Plan.parse(text)
    for kind in KINDS:
        priced = forecast(WORK, plan, per_byte(kind)).seconds
        assert priced["exchange"] + priced["replicas"] == pytest.approx(listed(plan, kind, 0), rel=1e-3, abs=0.1), kind


@in_one_test("text", ["pp=2 fsdp=2 micro=2", "pp=2 fsdp=2 micro=2 schedule=zbv", "pp=2 fsdp=2 zero=1 micro=2"])
def test_of_a_pipeline_what_the_rank_sends_that_sends_most(text: str) -> None:
    plan = Plan.parse(text)
    for kind in ("all-gather", "reduce-scatter"):
        most = max(listed(plan, kind, rank) for rank in range(plan.world_size))
        assert forecast(WORK, plan, per_byte(kind)).seconds["replicas"] == pytest.approx(most, rel=1e-3, abs=0.1)


@in_one_test(("precision", "norm", "priced"), [("fp32", False, False), ("fp32", True, True), ("fp16", False, True)])
def test_a_norm_is_priced_where_a_step_takes_one(precision: str, norm: bool, priced: bool) -> None:
    plan = Plan.parse(f"fsdp=2 precision={precision}")
    found = forecast(replace(WORK, norm=norm), plan, per_byte("all-reduce")).seconds["replicas"]
    assert found == pytest.approx(listed(plan, "all-reduce", 0) if priced else 0.0, abs=0.1)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [([1.0, 3.0, 1.0], "; rank 1 of dp takes 3.0 times as long for each"), ([1.0, 1.1, 1.0], ""), ([None, 3.0], "")],
)
def test_the_report_names_the_slowest_rank(seconds: list[float | None], said: str) -> None:
    assert slowest_rank(seconds) == said
