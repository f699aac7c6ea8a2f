"""A sampler of the user's own: its order, cut into global batches; what is refused; weights and buckets."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import phalanx as px
from phalanx.data import Lane, Ledger, Loader, audit
from phalanx.errors import SpecError

pytestmark = pytest.mark.quick


def job(**how: Any) -> px.Job:
    made: dict[str, Any] = {"model": torch.nn.Module, "loss": min, "optimizer": min, "batch": 4, "epochs": 2, **how}
    return px.Job(**{"data": lambda: torch.arange(10), **made})


def loader(parts: int = 1, part: int = 0, first: int = 0, micro: int | None = None, **how: Any) -> Loader:
    one = job(**how)
    return Loader(one.data(), one, Lane(first=part, count=1, parts=parts), micro=micro, first_step=first)


def batches(**how: Any) -> list[list[int]]:
    return [list(micro.ids) for step in loader(**how) for part in step.parts for micro in part]


def drawn(seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).integers(10, size=14)


OFTEN = px.Sampler(drawn, repeats=True)


def test_global_batches_are_cut_from_the_order() -> None:
    assert batches(sampler=OFTEN) == [
        order[start : start + 4] for order in (drawn(0, 0).tolist(), drawn(0, 1).tolist()) for start in range(0, 14, 4)
    ]
    assert loader(sampler=OFTEN).steps_per_epoch == 4
    assert loader(sampler=OFTEN, drop_last=True).total_steps == 6


@settings(max_examples=60, deadline=None)
@given(parts=st.integers(1, 4), first=st.integers(0, 7), micro=st.one_of(st.none(), st.integers(1, 3)))
def test_every_split_and_resume_sees_the_same(parts: int, first: int, micro: int | None) -> None:
    whole = batches(sampler=OFTEN)
    ranks = [list(loader(parts, part, first, micro, sampler=OFTEN)) for part in range(parts)]
    found = [
        [one for rank in step for part in rank.parts for one_micro in part for one in one_micro.ids]
        for step in zip(*ranks, strict=True)
    ]
    assert found == whole[first:]


def test_an_order_drawn_from_the_global_generators_is_that_of_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [*torch.randperm(5).tolist(), 5 + int(np.random.randint(5))]

    torch.manual_seed(5)
    state, mine = random.getstate(), torch.get_rng_state()
    loader(sampler=order)
    assert random.getstate() == state
    assert torch.equal(torch.get_rng_state(), mine)
    first = batches(sampler=order)
    torch.manual_seed(6)
    assert batches(sampler=order) == first
    assert first[:2] != first[2:]


def refused(what: Callable[[], Any]) -> str:
    with pytest.raises(SpecError) as caught:
        what()
    return str(caught.value)


@pytest.mark.parametrize(
    ("order", "text"),
    [
        (lambda seed, epoch: [0, 3, 10], "index 10 at place 2 in epoch 0, with data of 10 samples"),
        (lambda seed, epoch: np.array([-1, 3]), "index -1 at place 0"),
        (lambda seed, epoch: [1, 2, 1], "index 1 at places 0 and 2"),
        (lambda seed, epoch: [0.0, 1.0], "a list of float64, first 0.0"),
        (lambda seed, epoch: torch.tensor([True, False]), "a Tensor of bool, first True"),
        (lambda seed, epoch: [[1, 2]], "a list of shape (1, 2)"),
        (lambda seed, epoch: [[1], [1, 2]], "a list in epoch 0"),
        (lambda seed, epoch: (one for one in range(3)), "a generator in epoch 0"),
        (lambda seed, epoch: None, "a NoneType in epoch 0"),
        (lambda seed, epoch: [], "no index in epoch 0"),
        (px.weighted([1.0] * 11), "a sampler for 11 samples"),
    ],
)
def test_what_is_no_order_is_refused_before_the_first_step(order: Any, text: str) -> None:
    assert text in refused(lambda: loader(sampler=order))


def test_an_epoch_of_another_length_is_named() -> None:
    assert "2 indices in epoch 1, and 3 in epoch 0" in refused(
        lambda: batches(sampler=lambda _, epoch: range(3 - epoch))
    )


def test_a_sampler_that_raises_is_named() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        loader(sampler=lambda seed, epoch: [1 // epoch])
    assert "job.sampler gave the order of epoch 0" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        (torch.utils.data.WeightedRandomSampler([1.0], 1), "px.weighted(weights)"),
        (torch.utils.data.RandomSampler([1]), "shuffle=True"),
        (torch.utils.data.DistributedSampler([1], num_replicas=1, rank=0), "each rank is given its share"),
        (torch.utils.data.WeightedRandomSampler, "px.weighted(weights)"),
        ([1, 2], "np.random.default_rng([seed, epoch])"),
    ],
)
def test_an_object_is_refused_with_what_to_write(given: Any, fix: str) -> None:
    assert fix in refused(lambda: job(sampler=given))
    if not isinstance(given, list):
        assert fix in refused(lambda: px.Sampler(given))


def test_what_else_orders_samples_is_refused() -> None:
    assert "shuffle=False with a sampler" in refused(lambda: job(sampler=OFTEN, shuffle=False))
    assert "a sampler with a stream" in refused(lambda: loader(sampler=OFTEN, data=lambda: iter([1, 2])))


def ledger(folder: Path, **how: Any) -> None:
    with Ledger(folder, rank=0, first_step=0) as book:
        for step in loader(**how):
            book.record(step)


def test_the_audit_knows_what_a_sampler_may_give(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"length": 10, "batch": 4, "drop_last": False}
    ledger(tmp_path / "often", sampler=OFTEN)
    assert audit(tmp_path / "often", **facts, epoch_samples=14, repeats=True) == []
    assert audit(tmp_path / "often", **facts, epoch_samples=14)[0].startswith("epoch 0: ")
    assert audit(tmp_path / "often", **facts, epoch_samples=13, repeats=True)
    ledger(tmp_path / "few", sampler=lambda seed, epoch: [7, 2, 5, 3, 0])
    assert audit(tmp_path / "few", **facts, epoch_samples=5) == []
    assert audit(tmp_path / "few", **facts)


class TestWeighted:
    def test_samples_come_in_proportion(self) -> None:
        weights = torch.tensor([0.0, 1.0, 2.0, 0.0, 5.0, 0.0])
        order = px.weighted(weights, samples=20_000).function(3, 1)
        assert np.bincount(order, minlength=6) / 20_000 == pytest.approx((weights / 8).numpy(), abs=0.015)
        assert np.array_equal(order, px.weighted(weights.tolist(), 20_000).function(3, 1))
        assert not np.array_equal(order, px.weighted(weights, 20_000).function(3, 2))

    def test_without_replacement_the_first_one_comes_in_proportion(self) -> None:
        sampler = px.weighted([1, 0, 3], replacement=False, samples=2)
        orders = [sampler.function(0, epoch).tolist() for epoch in range(2000)]
        assert {tuple(sorted(order)) for order in orders} == {(0, 2)}
        assert sum(order[0] == 2 for order in orders) / 2000 == pytest.approx(0.75, abs=0.03)
        assert not sampler.repeats

    @pytest.mark.parametrize(
        ("how", "text"),
        [
            (([],), "a list"),
            (([1.0, -2.0],), "-2.0 at place 1"),
            (([1.0, float("nan")],), "nan at place 1"),
            (([0.0, 0.0],), "weights that are all 0"),
            ((["a"],), "a list"),
            (([1.0], 0), "0"),
            (([1.0, 0.0], 2, False), "at most the 1 with a weight above 0"),
            (([1.0, 0.0], None, False), "at most the 1 with a weight above 0"),
        ],
    )
    def test_what_are_no_weights_is_refused(self, how: tuple[Any, ...], text: str) -> None:
        assert text in refused(lambda: px.weighted(*how))


class TestBuckets:
    @settings(max_examples=60, deadline=None)
    @given(size=st.integers(1, 700), batch=st.integers(1, 40), seed=st.integers(0, 9))
    def test_each_sample_once(self, size: int, batch: int, seed: int) -> None:
        lengths = np.random.default_rng(seed).integers(1, 100, size)
        order = px.buckets(lengths).function(seed, 1, batch)
        assert np.array_equal(np.sort(order), np.arange(size))

    def test_batches_hold_similar_lengths_in_another_order_each_epoch(self) -> None:
        lengths = np.random.default_rng(0).integers(1, 1000, 500)
        made = [px.buckets(lengths).function(0, epoch, 16) for epoch in range(2)]
        for order in made:
            spans = [np.ptp(lengths[order[start : start + 16]]) for start in range(0, 496, 16)]
            assert max(spans) < 100
            firsts = [lengths[order[start]] for start in range(0, 496, 16)]
            assert firsts != sorted(firsts)
        assert not np.array_equal(*made)

    def test_the_batch_is_that_of_the_job(self) -> None:
        lengths = [3, 9, 1, 7, 2, 8, 3, 9, 1, 7]
        assert batches(sampler=px.buckets(lengths), batch=5, epochs=1) == [
            part.tolist() for part in np.split(px.buckets(lengths).function(0, 0, 5), 2)
        ]
