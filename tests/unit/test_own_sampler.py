"""The order of samples: a sampler of the user's own, weights, buckets and mixtures, and streams that share an epoch."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import Value
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_stream import a_job

import phalanx as px
from law_rows import in_one_test
from phalanx.data import EpochOrders, Lane, Ledger, Loader, audit
from phalanx.errors import SpecError


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


@in_one_test(
    ("order", "text"),
    [
        (lambda seed, epoch: [0, 3, 10], "index 10 at place 2 in epoch 0, with data of 10 samples"),
        (lambda seed, epoch: np.array([-1, 3]), "index -1 at place 0"),
        (lambda seed, epoch: [1, 2, 1], "index 1 at places 0 and 2"),
        (lambda seed, epoch: [0.0, 1.0], "a list of float64, first 0.0"),
        (lambda seed, epoch: [[1, 2]], "a list of shape (1, 2)"),
        (lambda seed, epoch: (one for one in range(3)), "a generator in epoch 0"),
        (lambda seed, epoch: [], "no index in epoch 0"),
        (px.weighted([1.0] * 11), "a sampler for 11 samples"),
    ],
)
def test_what_is_no_order_is_refused_before_the_first_step(order: Any, text: str) -> None:
    assert text in refused(lambda: loader(sampler=order))


@in_one_test(
    ("given", "fix"),
    [
        (torch.utils.data.WeightedRandomSampler([1.0], 1), "px.weighted(weights)"),
        (torch.utils.data.RandomSampler([1]), "shuffle=True"),
        (torch.utils.data.DistributedSampler([1], num_replicas=1, rank=0), "each rank is given its share"),
        ([1, 2], "np.random.default_rng([seed, epoch])"),
    ],
)
def test_an_object_is_refused_with_what_to_write(given: Any, fix: str) -> None:
    assert fix in refused(lambda: job(sampler=given))
    if not isinstance(given, list):
        assert fix in refused(lambda: px.Sampler(given))


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

    @in_one_test(
        ("how", "text"),
        [
            (([],), "a list"),
            (([1.0, -2.0],), "-2.0 at place 1"),
            (([1.0, float("nan")],), "nan at place 1"),
            ((["a"],), "a list"),
            (([1.0], 0), "0"),
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


TWO = {"web": list(range(30)), "books": [100 + value for value in range(7)]}


def order_of(mixture: px.Mixture, epoch: int, seed: int = 0) -> np.ndarray:
    return EpochOrders(sampler=mixture.sampler, seed=seed, size=len(mixture), batch=4)(epoch)


def counted(mixture: px.Mixture, epoch: int) -> Counter[str]:
    return Counter(mixture.locate(int(index))[0] for index in order_of(mixture, epoch))


def test_an_epoch_has_so_many_of_each() -> None:
    mixture = px.Mixture(TWO, {"web": 7, "books": 3}, samples=25)
    assert mixture.counts == {"web": 18, "books": 7}  # 17.5 and 7.5: the first of two equal remainders
    assert counted(mixture, 0) == counted(mixture, 5) == mixture.counts
    assert px.Mixture(TWO, {"web": 1.0, "books": 1.0}).counts == {"web": 19, "books": 18}


def test_every_sample_of_a_source_comes_before_any_comes_again() -> None:
    mixture = px.Mixture(TWO, {"web": 1, "books": 1}, samples=20)
    seen = Counter(int(index) for epoch in range(21) for index in order_of(mixture, epoch))
    assert {seen[index] for index in range(30)} == {7}  # 210 of 30
    assert {seen[index] for index in range(30, 37)} == {30}  # 210 of 7
    first = [mixture[int(index)] for epoch in range(3) for index in order_of(mixture, epoch)]
    assert sorted(value for value in first if value < 100) == list(range(30))
    begins = [{int(index) for index in order_of(mixture, epoch) if index < 30} for epoch in (0, 3)]
    assert begins[0] != begins[1]  # each pass has an order of its own


def test_whether_a_sample_may_come_twice_in_an_epoch_is_known() -> None:
    assert not px.Mixture(TWO, {"web": 30, "books": 7}).sampler.repeats
    assert not px.Mixture(TWO, {"web": 15, "books": 7}, samples=22).sampler.repeats  # half a pass, and a whole one
    assert px.Mixture(TWO, {"web": 1, "books": 1}, samples=20).sampler.repeats  # 10 of 7
    assert px.Mixture(TWO, {"web": 2, "books": 1}, samples=15).sampler.repeats  # 5 of 7: the second epoch goes over


def loader_of(mixture: px.Mixture, sampler: Any, **given: Any) -> Loader:
    how: dict[str, Any] = {"model": torch.nn.Module, "loss": min, "optimizer": min, "batch": 4, "epochs": 1, **given}
    return Loader(mixture, px.Job(data=lambda: mixture, sampler=sampler, **how), Lane(), micro=None)


def test_its_sampler_has_to_be_the_jobs() -> None:
    mixture, again = (px.Mixture(TWO, {"web": 1, "books": 1}) for _ in range(2))
    assert loader_of(mixture, again.sampler).epoch_samples == 37
    for sampler in (None, px.weighted([1.0] * 37)):
        with pytest.raises(SpecError, match=r"sampler=mixture\.sampler"):
            loader_of(mixture, sampler)
    outer = px.Mixture({"mixed": mixture}, {"mixed": 1})
    with pytest.raises(SpecError, match="Mixture with an order of its own, within a Mixture"):
        loader_of(outer, outer.sampler)


@in_one_test(
    ("made", "message"),
    [
        (lambda: px.Mixture({}, {}), "no source"),
        (lambda: px.Mixture([[1], [2]], [1, 2]), "a list"),
        (lambda: px.Mixture({"a": iter([1])}, {"a": 1}), "map-style"),
        (lambda: px.Mixture({"a": []}, {"a": 1}), "'a' without a sample"),
        (lambda: px.Mixture(TWO, {"web": 1}), r"weights of \['web'\]"),
        (lambda: px.Mixture(TWO, {"web": 1, "books": 0}), "finite numbers above 0"),
        (lambda: px.Mixture(TWO, {"web": 1, "books": float("nan")}), "finite numbers above 0"),
        (lambda: px.Mixture(TWO, {"web": 1, "books": 1}, samples=0), "px.Mixture.samples: given 0"),
        (lambda: px.Mixture(TWO, {"web": 1, "books": 0.01}, samples=10), "enough for a sample of each source"),
    ],
)
def test_what_is_no_mixture_is_refused(made: Callable[[], Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        made()


ROWS = datasets.Dataset.from_dict({"row": list(range(20))})


class OneLate:
    """Of two processes that read ``stream`` one begins its first pass once the other is in its second."""

    def __init__(self, stream: Any, folder: Path) -> None:
        self.streams, self.folder = [stream], folder

    def set_epoch(self, epoch: int) -> None:
        self.streams[0].set_epoch(epoch)
        if epoch:
            (self.folder / "ahead").touch()

    def __iter__(self) -> Iterator[Any]:
        with suppress(FileExistsError):
            (self.folder / "begun").mkdir()
            await_file(self.folder / "late")
            yield from self.streams[0]
            return
        (self.folder / "late").touch()
        await_file(self.folder / "ahead")
        yield from self.streams[0]


def await_file(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.01)


class Counted:
    """A stream whose epoch is a ``multiprocessing.Value``."""

    def __init__(self) -> None:
        self.epoch = Value("i", 0)

    def set_epoch(self, epoch: int) -> None:
        self.epoch.value = epoch

    def __iter__(self) -> Iterator[dict[str, int]]:
        for place in range(20):
            yield {"row": 100 * self.epoch.value + place}


def shuffled() -> datasets.IterableDataset:
    return ROWS.to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=5)


def rows(steps: Loader) -> list[int]:
    return [row for step in steps for part in step.parts for micro in part for row in micro.batch["row"].tolist()]


@pytest.mark.parametrize("made", [shuffled, Counted])
def test_a_process_that_is_ahead_does_not_move_the_others_to_its_pass(made: Callable[[], Any], tmp_path: Path) -> None:
    alone = rows(Loader(made(), a_job(batch=10, epochs=2), Lane(), micro=None))
    assert len(alone) == 40
    assert alone[:20] != alone[20:]
    late = OneLate(made(), tmp_path)
    assert rows(Loader(late, a_job(batch=10, epochs=2, workers=2), Lane(), micro=None)) == alone
