"""Which samples a step holds: permutation, shares, and global batches."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from phalanx.data import GlobalBatchSampler, Lane, share
from phalanx.data.sampler import Permutation
from phalanx.errors import SpecError
from phalanx.placement.batch_split import cuts

pytestmark = pytest.mark.quick


class TestPermutation:
    @settings(max_examples=150, deadline=None)
    @given(length=st.integers(1, 5000), seed=st.integers(0, 2**70), epoch=st.integers(0, 1000))
    def test_is_a_bijection(self, length: int, seed: int, epoch: int) -> None:
        numbers = Permutation.keyed(length, seed, epoch)(np.arange(length))
        assert np.array_equal(np.sort(numbers), np.arange(length))

    @pytest.mark.parametrize("length", [2**24 - 1, 2**24, 2**24 + 1, 10**9 + 7, 2**40 + 1, 2**62])
    def test_long_data_stay_within_and_do_not_collide(self, length: int) -> None:
        at = np.unique(np.concatenate([np.arange(2000), length - 1 - np.arange(2000)]))
        numbers = Permutation.keyed(length, 3, 1)(at)
        assert numbers.min() >= 0
        assert numbers.max() < length
        assert len(np.unique(numbers)) == len(at)

    def test_bijection_with_wide_words(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("phalanx.data.sampler._LARGEST_32", 0)
        for length in (1, 2, 7, 1000, 4097):
            numbers = Permutation.keyed(length, 0, 0)(np.arange(length))
            assert np.array_equal(np.sort(numbers), np.arange(length))

    @pytest.mark.parametrize("length", [3, 4, 5])
    def test_every_order_of_few_is_equally_likely(self, length: int) -> None:
        runs = 20 * math.factorial(length)
        seen = Counter(tuple(Permutation.keyed(length, seed, 0)(np.arange(length)).tolist()) for seed in range(runs))
        expected = runs / math.factorial(length)
        found = sum((seen[order] - expected) ** 2 / expected for order in itertools.permutations(range(length)))
        assert chi2.sf(found, math.factorial(length) - 1) > 0.001

    @pytest.mark.parametrize("length", [50, 1100])
    def test_positions_and_neighbours_are_uniform(self, length: int) -> None:
        runs = 600
        places = np.zeros((length, length))
        gaps = np.zeros(length)
        for seed in range(runs):
            numbers = Permutation.keyed(length, seed, 1)(np.arange(length))
            places[np.arange(length), numbers] += 1
            gaps += np.bincount((numbers[1:] - numbers[:-1]) % length, minlength=length)
        expected = runs / length
        assert chi2.sf(((places - expected) ** 2 / expected).sum(), (length - 1) ** 2) > 0.001
        expected = gaps.sum() / (length - 1)
        assert chi2.sf(((gaps[1:] - expected) ** 2 / expected).sum(), length - 2) > 0.001

    def test_golden_values(self) -> None:
        """An order is part of a run's identity: a resumed run must find it again in later versions."""
        assert Permutation.keyed(10, 0, 0)(np.arange(10)).tolist() == GOLDEN_10
        assert Permutation.keyed(10**6, 7, 3)(np.arange(5)).tolist() == GOLDEN_MILLION
        assert Permutation.keyed(10**12, 7, 3)(np.arange(3)).tolist() == GOLDEN_LONG

    @pytest.mark.parametrize("length", [0, -1, 2**62 + 1])
    def test_refuses_lengths_it_cannot_serve(self, length: int) -> None:
        with pytest.raises(ValueError, match="length from 1 to"):
            Permutation.keyed(length, 0)


class TestShare:
    def test_256_over_3(self) -> None:
        assert [share(256, part, 3) for part in range(3)] == [(0, 86), (86, 171), (171, 256)]

    @given(total=st.integers(0, 10_000), parts=st.integers(1, 300))
    def test_shares_tile_the_batch(self, total: int, parts: int) -> None:
        shares = [share(total, part, parts) for part in range(parts)]
        assert shares[0][0] == 0
        assert shares[-1][1] == total
        assert all(before[1] == after[0] for before, after in itertools.pairwise(shares))
        sizes = [stop - start for start, stop in shares]
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) - min(sizes) <= 1

    @pytest.mark.parametrize(("part", "parts"), [(-1, 2), (2, 2), (0, 0)])
    def test_refuses_parts_that_are_not_there(self, part: int, parts: int) -> None:
        with pytest.raises(ValueError, match="no part"):
            share(8, part, parts)

    def test_lane_refuses_parts_that_are_not_there(self) -> None:
        with pytest.raises(ValueError, match="not all among 4"):
            Lane(first=3, count=2, parts=4)


class TestCuts:
    def test_micro_batches_of_a_share(self) -> None:
        assert cuts(256, Lane(first=1, count=1, parts=3), 32) == (((86, 118), (118, 150), (150, 171)),)

    def test_all_parts_have_as_many_as_the_largest(self) -> None:
        assert cuts(5, Lane(first=0, count=2, parts=2), 2) == (((0, 2), (2, 3)), ((3, 5), (0, 0)))

    def test_fewer_samples_than_parts(self) -> None:
        assert cuts(2, Lane(first=0, count=4, parts=4), None) == (((0, 1),), ((1, 2),), ((0, 0),), ((0, 0),))

    @given(total=st.integers(1, 300), parts=st.integers(1, 40), micro=st.one_of(st.none(), st.integers(1, 50)))
    def test_each_sample_once_and_counts_line_up(self, total: int, parts: int, micro: int | None) -> None:
        lanes = [cuts(total, Lane(first=part, count=1, parts=parts), micro)[0] for part in range(parts)]
        assert len({len(pieces) for pieces in lanes}) == 1
        seen = [sample for pieces in lanes for start, stop in pieces for sample in range(start, stop)]
        assert seen == list(range(total))
        assert micro is None or all(stop - start <= micro for pieces in lanes for start, stop in pieces)
        assert cuts(total, Lane(first=0, count=parts, parts=parts), micro) == tuple(lanes)


class TestGlobalBatchSampler:
    @settings(max_examples=40, deadline=None)
    @given(length=st.integers(1, 300), batch=st.integers(1, 60), shuffle=st.booleans(), drop_last=st.booleans())
    def test_an_epoch_holds_each_sample_once(self, length: int, batch: int, shuffle: bool, drop_last: bool) -> None:
        if drop_last and batch > length:
            return
        sampler = GlobalBatchSampler(length=length, batch=batch, seed=1, shuffle=shuffle, drop_last=drop_last)
        steps = sampler.steps_per_epoch
        for epoch in (0, 2):
            ids = np.concatenate([sampler.ids(step) for step in range(epoch * steps, (epoch + 1) * steps)])
            assert len(ids) == (length // batch * batch if drop_last else length)
            assert len(np.unique(ids)) == len(ids)
            assert {sampler.epoch_of(step) for step in range(epoch * steps, (epoch + 1) * steps)} == {epoch}

    @settings(max_examples=40, deadline=None)
    @given(length=st.integers(1, 500), batch=st.integers(1, 60), first=st.integers(0, 50), count=st.integers(0, 50))
    def test_walking_gives_what_single_steps_give(self, length: int, batch: int, first: int, count: int) -> None:
        sampler = GlobalBatchSampler(length=length, batch=batch, seed=5)
        walked = list(sampler.walk(first, first + count))
        assert [step for step, _, _ in walked] == list(range(first, first + count))
        for step, epoch, ids in walked:
            assert epoch == sampler.epoch_of(step)
            assert np.array_equal(ids, sampler.ids(step))
            assert len(ids) == sampler.samples(step)

    def test_walking_crosses_blocks_of_ids(self) -> None:
        sampler = GlobalBatchSampler(length=30_000, batch=7, seed=5)
        steps = [1169, 1170, 1171, 4284, 4285, 4286]
        walked = {step: ids for step, _, ids in sampler.walk(0, 4300)}
        assert all(np.array_equal(walked[step], sampler.ids(step)) for step in steps)

    @settings(max_examples=60, deadline=None)
    @given(data=st.data(), length=st.integers(1, 300), batch=st.integers(1, 60), shuffle=st.booleans())
    def test_a_part_of_a_batch_is_computed_by_itself(
        self, data: st.DataObject, length: int, batch: int, shuffle: bool
    ) -> None:
        sampler = GlobalBatchSampler(length=length, batch=batch, seed=3, shuffle=shuffle)
        parts = data.draw(st.integers(1, 8))
        first = data.draw(st.integers(0, parts - 1))
        lane = Lane(first=first, count=data.draw(st.integers(1, parts - first)), parts=parts)
        found = sampler.walk_held(2, 9, lambda _, samples: cuts(samples, lane, 2))
        for step, (at, epoch, ids, held) in enumerate(found, start=2):
            whole = sampler.ids(step)
            assert (at, epoch, len(ids)) == (step, sampler.epoch_of(step), len(whole))
            assert held == cuts(len(whole), lane, 2)
            for start, stop in (one for part in held for one in part):
                assert ids[start:stop].tolist() == whole[start:stop].tolist() if stop else True
            assert ids[:1].tolist() == whole[:1].tolist()

    def test_epochs_and_seeds_differ(self) -> None:
        sampler = GlobalBatchSampler(length=1000, batch=1000, seed=0)
        other = GlobalBatchSampler(length=1000, batch=1000, seed=1)
        orders = [sampler.ids(0), sampler.ids(1), other.ids(0), other.ids(1), np.arange(1000)]
        for one, two in itertools.combinations(orders, 2):
            # Two independent orders of 1000 agree at one place on average.
            assert np.count_nonzero(one == two) < 10

    def test_without_shuffling_the_order_is_that_of_the_data(self) -> None:
        sampler = GlobalBatchSampler(length=10, batch=4, seed=9, shuffle=False)
        assert [sampler.ids(step).tolist() for step in range(4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]

    def test_a_far_step_needs_no_long_list(self) -> None:
        sampler = GlobalBatchSampler(length=10**15, batch=256, seed=0)
        ids = sampler.ids(10**12)
        assert len(np.unique(ids)) == 256
        assert ids.dtype == np.int64

    def test_dropping_everything_is_refused(self) -> None:
        with pytest.raises(SpecError, match="nothing would be left") as caught:
            GlobalBatchSampler(length=10, batch=32, seed=0, drop_last=True)
        assert "batch=10" in str(caught.value)

    def test_all_problems_at_once(self) -> None:
        with pytest.raises(SpecError) as caught:
            GlobalBatchSampler(length=0, batch=0, seed=0)
        assert [problem.where for problem in caught.value.problems] == ["job.batch", "job.data"]

    def test_negative_steps_are_refused(self) -> None:
        with pytest.raises(ValueError, match="steps count from 0"):
            GlobalBatchSampler(length=10, batch=2, seed=0).ids(-1)


GOLDEN_10 = [6, 3, 8, 9, 0, 5, 4, 1, 2, 7]
GOLDEN_MILLION = [472542, 507917, 380058, 828577, 46131]
GOLDEN_LONG = [88749952910, 274409705361, 355886283668]
