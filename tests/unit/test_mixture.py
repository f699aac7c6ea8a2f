"""Mixtures of data sets: how many samples of each an epoch has, in what order, and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import phalanx as px
from phalanx.data import EpochOrders, Lane, Loader
from phalanx.errors import SpecError

pytestmark = pytest.mark.quick

TWO = {"web": list(range(30)), "books": [100 + value for value in range(7)]}


def order(mixture: px.Mixture, epoch: int, seed: int = 0) -> np.ndarray:
    return EpochOrders(sampler=mixture.sampler, seed=seed, size=len(mixture), batch=4)(epoch)


def counted(mixture: px.Mixture, epoch: int) -> Counter[str]:
    return Counter(mixture.locate(int(index))[0] for index in order(mixture, epoch))


def test_an_epoch_has_so_many_of_each() -> None:
    mixture = px.Mixture(TWO, {"web": 7, "books": 3}, samples=25)
    assert mixture.counts == {"web": 18, "books": 7}  # 17.5 and 7.5: the first of two equal remainders
    assert counted(mixture, 0) == counted(mixture, 5) == mixture.counts
    assert px.Mixture(TWO, {"web": 1.0, "books": 1.0}).counts == {"web": 19, "books": 18}


def test_indices_count_through_the_sources() -> None:
    mixture = px.Mixture(TWO, {"web": 1, "books": 1})
    assert len(mixture) == 37
    assert [mixture[index] for index in (0, 29, 30, 36)] == [0, 29, 100, 106]
    assert mixture.locate(30) == ("books", 0)
    with pytest.raises(IndexError):
        mixture[37]


def test_every_sample_of_a_source_comes_before_any_comes_again() -> None:
    mixture = px.Mixture(TWO, {"web": 1, "books": 1}, samples=20)
    seen = Counter(int(index) for epoch in range(21) for index in order(mixture, epoch))
    assert {seen[index] for index in range(30)} == {7}  # 210 of 30
    assert {seen[index] for index in range(30, 37)} == {30}  # 210 of 7
    first = [mixture[int(index)] for epoch in range(3) for index in order(mixture, epoch)]
    assert sorted(value for value in first if value < 100) == list(range(30))


def test_orders_differ_by_epoch_and_seed_and_depend_on_nothing_else() -> None:
    mixture, again = (px.Mixture(TWO, {"web": 0.5, "books": 0.5}, samples=14) for _ in range(2))
    assert order(mixture, 3).tolist() == order(again, 3).tolist()
    assert order(mixture, 3).tolist() != order(mixture, 4).tolist()
    assert order(mixture, 3).tolist() != order(mixture, 3, seed=1).tolist()
    assert mixture.sampler == again.sampler


def test_whether_a_sample_may_come_twice_in_an_epoch_is_known() -> None:
    assert not px.Mixture(TWO, {"web": 30, "books": 7}).sampler.repeats
    assert px.Mixture(TWO, {"web": 1, "books": 1}, samples=20).sampler.repeats  # 10 of 7
    assert px.Mixture(TWO, {"web": 2, "books": 1}, samples=15).sampler.repeats  # 5 of 7: the second epoch goes over


def test_what_drop_last_leaves_out_comes_in_the_next_pass() -> None:
    mixture = px.Mixture({"one": list(range(30))}, {"one": 1}, samples=10)
    steps = loader(mixture, mixture.sampler, drop_last=True, epochs=6)
    batches = [[*micro.ids] for step in steps for part in step.parts for micro in part]
    epochs = [batches[at] + batches[at + 1] for at in range(0, 12, 2)]
    assert [len(set(one)) for one in epochs] == [8] * 6  # 2 of 10 are left out
    assert [len({index for one in epochs[at : at + 3] for index in one}) for at in (0, 3)] == [24, 24]
    assert len({index for one in epochs for index in one}) > 24


def loader(mixture: px.Mixture, sampler: Any, **given: Any) -> Loader:
    how: dict[str, Any] = {"model": torch.nn.Module, "loss": min, "optimizer": min, "batch": 4, "epochs": 1, **given}
    return Loader(mixture, px.Job(data=lambda: mixture, sampler=sampler, **how), Lane(), micro=None)


def test_its_sampler_has_to_be_the_jobs() -> None:
    mixture, again = (px.Mixture(TWO, {"web": 1, "books": 1}) for _ in range(2))
    assert loader(mixture, again.sampler).epoch_samples == 37
    for sampler in (None, px.weighted([1.0] * 37)):
        with pytest.raises(SpecError, match=r"sampler=mixture\.sampler"):
            loader(mixture, sampler)
    outer = px.Mixture({"mixed": mixture}, {"mixed": 1})
    with pytest.raises(SpecError, match="Mixture with an order of its own, within a Mixture"):
        loader(outer, outer.sampler)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: px.Mixture({}, {}), "no source"),
        (lambda: px.Mixture([[1], [2]], [1, 2]), "a list"),  # pyright: ignore
        (lambda: px.Mixture({"a": iter([1])}, {"a": 1}), "map-style"),
        (lambda: px.Mixture({"a": []}, {"a": 1}), "'a' without a sample"),
        (lambda: px.Mixture(TWO, {"web": 1}), r"weights of \['web'\]"),
        (lambda: px.Mixture(TWO, {"web": 1, "books": 0}), "finite numbers above 0"),
        (lambda: px.Mixture(TWO, {"web": 1, "books": float("nan")}), "finite numbers above 0"),
        (lambda: px.Mixture(TWO, {"web": 1, "books": 1}, samples=0), "px.Mixture.samples: given 0"),
        (lambda: px.Mixture(TWO, {"web": 1, "books": 0.01}, samples=10), "enough for a sample of each source"),
    ],
)
def test_what_is_refused(made: Callable[[], Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        made()
