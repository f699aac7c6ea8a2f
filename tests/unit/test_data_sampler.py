"""Sample ids of each step: permutations, global batches, and batches or data that change with the step."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import astuple, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.special import chdtrc
from torch import nn
from torch.utils.data import TensorDataset, random_split

import phalanx as px
from law_rows import longer
from phalanx.data import GlobalBatchSampler, Lane, Ledger, Loader, audit_run, due
from phalanx.data.changing_batches import ChangingBatchSampler, Stretch, never_reached
from phalanx.data.sampler import Permutation
from phalanx.errors import SpecError
from phalanx.placement.batch_split import cuts
from phalanx.witness.plain_loop import Witness

pytestmark = pytest.mark.quick


class TestPermutation:
    @settings(max_examples=150, deadline=None)
    @given(length=st.integers(1, 5000), seed=st.integers(0, 2**70), epoch=st.integers(0, 1000))
    def test_is_a_bijection(self, length: int, seed: int, epoch: int) -> None:
        numbers = Permutation.keyed(length, seed, epoch)(np.arange(length))
        assert np.array_equal(np.sort(numbers), np.arange(length))

    @pytest.mark.parametrize("length", [2**24, 2**24 + 1, 2**40 + 1, 2**62])
    def test_long_data_stay_within_and_do_not_collide(self, length: int) -> None:
        at = np.unique(np.concatenate([np.arange(2000), length - 1 - np.arange(2000)]))
        numbers = Permutation.keyed(length, 3, 1)(at)
        assert numbers.min() >= 0
        assert numbers.max() < length
        assert len(np.unique(numbers)) == len(at)

    @pytest.mark.parametrize("length", [3, 4, 5])
    def test_every_order_of_few_is_equally_likely(self, length: int) -> None:
        runs = 20 * math.factorial(length)
        seen = Counter(tuple(Permutation.keyed(length, seed, 0)(np.arange(length)).tolist()) for seed in range(runs))
        expected = runs / math.factorial(length)
        found = sum((seen[order] - expected) ** 2 / expected for order in itertools.permutations(range(length)))
        assert chdtrc(math.factorial(length) - 1, found) > 0.001

    @pytest.mark.parametrize("length", [50, *longer(1100)])
    def test_positions_and_neighbours_are_uniform(self, length: int) -> None:
        runs = 600
        places = np.zeros((length, length))
        gaps = np.zeros(length)
        for seed in range(runs):
            numbers = Permutation.keyed(length, seed, 1)(np.arange(length))
            places[np.arange(length), numbers] += 1
            gaps += np.bincount((numbers[1:] - numbers[:-1]) % length, minlength=length)
        expected = runs / length
        assert chdtrc((length - 1) ** 2, ((places - expected) ** 2 / expected).sum()) > 0.001
        expected = gaps.sum() / (length - 1)
        assert chdtrc(length - 2, ((gaps[1:] - expected) ** 2 / expected).sum()) > 0.001

    def test_golden_values(self) -> None:
        """An order is part of a run's identity: a resumed run must find it again in later versions."""
        assert Permutation.keyed(10, 0, 0)(np.arange(10)).tolist() == GOLDEN_10
        assert Permutation.keyed(10**6, 7, 3)(np.arange(5)).tolist() == GOLDEN_MILLION
        assert Permutation.keyed(10**12, 7, 3)(np.arange(3)).tolist() == GOLDEN_LONG


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

    def test_without_shuffling_the_order_is_that_of_the_data(self) -> None:
        sampler = GlobalBatchSampler(length=10, batch=4, seed=9, shuffle=False)
        assert [sampler.ids(step).tolist() for step in range(4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]

    def test_a_far_step_needs_no_long_list(self) -> None:
        sampler = GlobalBatchSampler(length=10**15, batch=256, seed=0)
        ids = sampler.ids(10**12)
        assert len(np.unique(ids)) == 256
        assert ids.dtype == np.int64


GOLDEN_10 = [6, 3, 8, 9, 0, 5, 4, 1, 2, 7]
GOLDEN_MILLION = [472542, 507917, 380058, 828577, 46131]
GOLDEN_LONG = [88749952910, 274409705361, 355886283668]


def job(**how: Any) -> px.Job:
    made: dict[str, Any] = {
        "model": lambda: torch.nn.Linear(3, 2),
        "data": lambda: rows(40),
        "loss": lambda output, batch: output.mean(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "batch": 8,
        "steps": 20,
        **how,
    }
    return px.Job(**made)


def rows(count: int, width: int = 3) -> px.Table:
    return px.Table(x=torch.zeros(count, width))


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[Stretch], bool]:
    sizes = draw(st.lists(st.integers(5, 40), min_size=1, max_size=3))
    stretches, first, begin = list[Stretch](), 0, 0
    for size in sizes:
        for _ in range(draw(st.integers(1, 3))):
            stretches.append(Stretch(first, draw(st.integers(1, 5)), begin, size, size))
            first += draw(st.integers(1, 12))
        begin += size
    return stretches, draw(st.booleans())


def told(stretches: list[Stretch]) -> list[list[int]]:
    return [list(astuple(one)) for one in stretches]


@settings(max_examples=60, deadline=None)
@given(runs())
def test_any_step_is_where_counting_step_by_step_comes_to(run: tuple[list[Stretch], bool]) -> None:
    stretches, drop_last = run
    sampler = ChangingBatchSampler(stretches, seed=3, drop_last=drop_last)
    steps = stretches[-1].first + 25
    found = list(sampler.walk(0, steps))
    for (step, epoch, ids), must in zip(found, islice(due(told(stretches), drop_last=drop_last), steps), strict=True):
        assert (epoch, len(ids)) == (must.epoch, must.samples) == (sampler.epoch_of(step), sampler.samples(step))
        assert all(int(index) in must.among for index in ids)
        assert sampler.ids(step).tolist() == ids.tolist()
    for epoch in {epoch for _, epoch, _ in found}:
        seen = np.concatenate([ids for _, its, ids in found if its == epoch]).tolist()
        assert len(set(seen)) == len(seen)


@settings(max_examples=40, deadline=None)
@given(st.integers(5, 40), st.integers(1, 5), st.booleans())
def test_one_stretch_is_a_run_without_change(length: int, batch: int, drop_last: bool) -> None:
    one = ChangingBatchSampler([Stretch(0, batch, 0, length, length)], seed=1, drop_last=drop_last)
    plain = GlobalBatchSampler(length=length, batch=batch, seed=1, drop_last=drop_last)
    assert one.steps_of(3) == plain.steps_of(3)
    for (_, epoch, ids), (_, must, wanted) in zip(one.walk(0, 30), plain.walk(0, 30), strict=True):
        assert (epoch, ids.tolist()) == (must, wanted.tolist())


@settings(max_examples=60, deadline=None)
@given(runs(), st.integers(1, 6))
@example(([Stretch(0, 3, 0, 7, 7), Stretch(4, 1, 0, 7, 7)], True), 2)  # what 3 leave out, 1 takes
def test_steps_of_so_many_epochs(run: tuple[list[Stretch], bool], epochs: int) -> None:
    stretches = [one for one in run[0] if one.begin == 0]
    sampler = ChangingBatchSampler(stretches, seed=3, drop_last=run[1])
    counted = sum(1 for must in islice(due(told(stretches), drop_last=run[1]), 500) if must.epoch < epochs)
    assert sampler.steps_of(epochs) == counted


BAD_RAMPS: list[tuple[dict[str, Any], str]] = [
    ({"batch_ramp": {5: 4, 9: 8}}, "a first step of 5"),
    ({"batch_ramp": {0: 4, 9: 8, 5: 6}}, "steps that increase"),
    ({"batch_ramp": {0: 4.5, 9: 8}}, "4.5 from step 0 on"),
    ({"batch_ramp": {0: 0, 9: 8}}, "0 from step 0 on"),
    ({"batch_ramp": {"0": 4}}, "step '0'"),
    ({"batch_ramp": {}}, "no step"),
    ({"batch_ramp": [4, 8]}, "a list"),
    ({"batch_ramp": {0: 4, 9: 16}}, "whose largest is 16"),
    ({"batch_ramp": {0: 4, 9: 8}, "sampler": px.buckets([1] * 40)}, "px.buckets"),
    ({"batch_ramp": {0: 4, 9: 8}, "schedule": px.Schedule(warmup_samples=40)}, "warmup_steps"),
]
BAD_CURRICULA: list[tuple[Any, str]] = [
    ({3: rows(4)}, "a first step of 3"),
    ({0: rows(4), 9: rows(5), 5: rows(6)}, "steps that increase"),
    ({0: rows(4), 1.5: rows(5)}, "step 1.5"),
    ({0: rows(4), 5: iter([])}, "from step 5 on"),
    ({0: rows(4), 5: []}, "no sample from step 5 on"),
    ({}, "no source"),
    ([rows(4)], "a list"),
]


def test_a_ramp_and_a_curriculum_that_are_none_are_refused() -> None:
    for how, words in BAD_RAMPS:
        with pytest.raises(SpecError, match=words):
            job(**how)
    for sources, words in BAD_CURRICULA:
        with pytest.raises(SpecError, match=words):
            px.Curriculum(sources)


class Stream:
    def __iter__(self) -> Any:
        return iter([{"x": torch.zeros(3)}] * 40)


@pytest.mark.parametrize(
    ("data", "how", "words"),
    [
        (Stream(), {"batch_ramp": {0: 4, 9: 8}}, "batch_ramp with a stream"),
        (px.Curriculum({0: rows(9), 5: rows(9)}), {"steps": None, "epochs": 3}, "epochs=3 with a px.Curriculum"),
        (px.Curriculum({0: rows(9)}), {"sampler": lambda seed, epoch: [0]}, "a sampler with a px.Curriculum"),
        (rows(6), {"batch_ramp": {0: 4, 9: 8}, "drop_last": True}, "6 samples and a batch of 8 from step 9 on"),
    ],
)
def test_what_does_not_go_together_is_refused(data: Any, how: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Loader(data, job(**how), Lane(), micro=None)


def test_the_largest_samples_are_what_is_looked_at() -> None:
    loader = Loader(px.Curriculum({0: rows(4), 5: rows(3, width=7), 9: rows(2)}), job(), Lane(), micro=None)
    assert loader.example(2)["x"].shape == (2, 7)
    assert [place for place, _ in loader.spread(9)] == [4, 5, 6]
    assert loader.steps_per_epoch is None


def test_a_plan_has_a_sample_for_each_replica_in_every_step() -> None:
    from phalanx.parallel.assemble import check

    given = job(batch=16, batch_ramp={0: 2, 5: 16})
    (problem,) = check(given, px.Plan.parse("dp=4 device=cpu"))
    assert "4 replicas for a global batch of 2, which batch_ramp has from step 0 on" in problem.given
    assert not check(given, px.Plan.parse("dp=2 device=cpu"))
    assert any("shares=auto" in one.given for one in check(given, px.Plan.parse("dp=2 shares=auto device=cpu")))


def test_what_is_never_reached_is_told() -> None:
    ramp = {0: 4, 5: 8, 30: 6}
    (said,) = never_reached(Loader(rows(40), job(batch_ramp=ramp), Lane(), micro=None).stretches, 20)
    assert said == "step 30, from which on a batch has 6 samples, is never reached: the run ends after 20 steps."


@pytest.mark.parametrize("wrong", ["lost", "doubled", "another source"])
def test_an_audit_finds_what_is_wrong(wrong: str, tmp_path: Path) -> None:
    both = px.Curriculum({0: rows(10), 3: rows(9)})
    loader = Loader(both, job(batch=4, batch_ramp={0: 2, 2: 4}, steps=8), Lane(), micro=None)
    with Ledger(tmp_path, rank=0, first_step=0) as ledger:
        for batch in loader:
            ids = list(batch.parts[0][0].ids)
            if batch.step == 4:
                changed = {"lost": ids[:-1], "doubled": [*ids[:-1], ids[0]], "another source": [*ids[:-1], 2]}
                ids = changed[wrong]
            micro = replace(batch.parts[0][0], ids=tuple(ids), samples=len(ids))
            ledger.record(replace(batch, parts=((micro,),)))
    start = {"stretches": told(list(loader.stretches)), "drop_last": False, "repeats": False}
    (found,) = audit_run(tmp_path, start)
    words = {
        "lost": "step 4 holds 3 samples instead of 4",
        "doubled": "seen more than once",
        "another source": "beyond",
    }
    assert words[wrong] in found


def parts() -> tuple[object, ...]:
    noise = torch.from_numpy(np.random.rand(100, 1)).float()
    return tuple(random_split(TensorDataset(torch.arange(100.0)[:, None], noise), [80, 20]))


def noted(seen: list[list[int]], part: object) -> object:
    seen.append(sorted(part.indices))
    return part


@pytest.mark.parametrize("way", ["built", "plain loop"])
def test_a_random_split_in_data_and_evaluate_shares_no_sample(way: str) -> None:
    trained, evaluated = list[list[int]](), list[list[int]]()
    job = px.Job(
        model=lambda: nn.Linear(1, 1),
        data=lambda: noted(trained, parts()[0]),
        evaluate=lambda: noted(evaluated, parts()[1]),
        loss=lambda output, batch: px.mse(output, batch[1]),
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-6),
        batch=20,
        steps=1,
        seed=3,
    )
    torch.manual_seed(8)
    if way == "built":
        loop = px.build(job, px.Plan())
        torch.rand(5)
        before = torch.get_rng_state()
        loop[0].evaluate()
        assert torch.equal(before, torch.get_rng_state())
    else:
        Witness.of(job, 1)
    assert len({tuple(one) for one in trained}) == len({tuple(one) for one in evaluated}) == 1
    assert sorted(trained[0] + evaluated[0]) == list(range(100))
