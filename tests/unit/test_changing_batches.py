"""Where each step's batch begins, where the batch or the data change with the step; and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import phalanx as px
from phalanx.data import (
    ChangingBatchSampler,
    GlobalBatchSampler,
    Lane,
    Ledger,
    Loader,
    Stretch,
    audit_run,
    due,
    never_reached,
)
from phalanx.errors import SpecError

pytestmark = pytest.mark.quick


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
    return [one.to_list() for one in stretches]


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


@pytest.mark.parametrize(
    ("how", "words"),
    [
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
    ],
)
def test_a_ramp_that_is_none_is_refused(how: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        job(**how)


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ({3: rows(4)}, "a first step of 3"),
        ({0: rows(4), 9: rows(5), 5: rows(6)}, "steps that increase"),
        ({0: rows(4), 1.5: rows(5)}, "step 1.5"),
        ({0: rows(4), 5: iter([])}, "from step 5 on"),
        ({0: rows(4), 5: []}, "no sample from step 5 on"),
        ({}, "no source"),
        ([rows(4)], "a list"),
    ],
)
def test_a_curriculum_that_is_none_is_refused(sources: Any, words: str) -> None:
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


def test_samples_are_told_by_source() -> None:
    both = px.Curriculum({0: rows(4), 5: rows(3, width=7)})
    assert (len(both), both.locate(3), both.locate(4), both[6]["x"].shape) == (7, (0, 3), (5, 0), (7,))
    with pytest.raises(IndexError, match="sample 7 of 7"):
        both[7]


def test_the_largest_samples_are_what_is_looked_at() -> None:
    loader = Loader(px.Curriculum({0: rows(4), 5: rows(3, width=7), 9: rows(2)}), job(), Lane(), micro=None)
    assert loader.example(2)["x"].shape == (2, 7)
    assert [place for place, _ in loader.spread(9)] == [4, 5, 6]
    assert loader.steps_per_epoch is None


def test_a_mixture_within_a_curriculum_keeps_its_order() -> None:
    mixture = px.Mixture({"a": rows(6), "b": rows(9)}, {"a": 1, "b": 1}, samples=8)
    loader = Loader(px.Curriculum({0: rows(5), 2: mixture}), job(batch=4, steps=6), Lane(), micro=None)
    ids = [[index for micro in step.parts[0] for index in micro.ids] for step in loader]
    wanted = np.concatenate([mixture.sampler.indices(0, epoch, 4) for epoch in (0, 1)]) + 5
    assert [len(each) for each in ids] == [4, 1, 4, 4, 4, 4]
    assert [index for each in ids[2:] for index in each] == wanted.tolist()
    assert loader.repeats == mixture.sampler.repeats


def test_a_plan_has_a_sample_for_each_replica_in_every_step() -> None:
    from phalanx.parallel.assemble import check

    given = job(batch=16, batch_ramp={0: 2, 5: 16})
    (problem,) = check(given, px.Plan.parse("dp=4 device=cpu"))
    assert "4 replicas for a global batch of 2, which batch_ramp has from step 0 on" in problem.given
    assert not check(given, px.Plan.parse("dp=2 device=cpu"))
    assert any("shares=auto" in one.given for one in check(given, px.Plan.parse("dp=2 shares=auto device=cpu")))


def test_a_forecast_says_of_which_step_it_is() -> None:
    from phalanx.hardware import cluster
    from phalanx.planner.rules import problems
    from phalanx.train.traced_job import steps_of, work_of

    sources = px.Curriculum({0: rows(40), 4: torch.utils.data.TensorDataset(torch.zeros(30, 5, 3))})
    given = job(
        model=lambda: torch.nn.Linear(3, 2),
        data=lambda: sources,
        inputs=lambda batch: batch["x"] if isinstance(batch, dict) else batch[0],
        batch_ramp={0: 2, 5: 8},
        steps=9,
    )
    work = work_of(given)
    assert (work.batch, work.smaller) == (8, (2,))
    assert any("samples from step 4 on, the largest" in note for note in work.profile.notes)
    assert any("batch_ramp: each step is priced as one of 8 samples" in note for note in work.profile.notes)
    (problem, *_) = problems(px.Plan.parse("dp=4"), work, cluster("4xA100-80GB"))
    assert "4 replicas for a global batch of 2" in problem.given
    assert steps_of(job(steps=None, epochs=2, batch_ramp={0: 4, 5: 8})) == 5 + 3 + 5


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
