"""The loader over map-style data: the same steps on any number of parts, from any step, with any number of workers."""

from __future__ import annotations

import multiprocessing
import random
import resource
from collections.abc import Iterable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, default_collate

from phalanx.config import Job
from phalanx.data import GlobalBatchSampler, Lane, Loader, StepBatch, Table, evaluation_batches
from phalanx.errors import DataError, SpecError

# The suggestion depends on the machine's cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def a_job(**options: Any) -> Job:
    unused: Any = print
    options = {"batch": 8, **options}
    if "steps" not in options:
        options.setdefault("epochs", 1)
    return Job(model=unused, data=unused, loss=unused, optimizer=unused, **options)


def a_table(length: int) -> Table:
    return Table(id=torch.arange(length), square=np.arange(length, dtype=np.float32) ** 2)


class Augmented(Dataset[dict[str, Any]]):
    """Each sample draws from all three global streams."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "drawn": torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])}


class Many(Augmented):
    """The same, fetched many at a time."""

    def __getitems__(self, ids: list[int]) -> list[dict[str, Any]]:
        assert type(ids) is list
        return [self[index] for index in ids]


def flat(steps: Iterable[StepBatch]) -> list[tuple[int, int, int, tuple[tuple[tuple[int, ...], ...], ...]]]:
    return [
        (step.step, step.epoch, step.samples, tuple(tuple(micro.ids for micro in part) for part in step.parts))
        for step in steps
    ]


def drawn(steps: Iterable[StepBatch]) -> dict[tuple[int, int], tuple[float, ...]]:
    """(epoch, sample) → what the sample drew."""
    found: dict[tuple[int, int], tuple[float, ...]] = {}
    for step in steps:
        for micro in (micro for part in step.parts for micro in part if micro.samples):
            for index, values in zip(micro.batch["id"].tolist(), micro.batch["drawn"].tolist(), strict=True):
                found[step.epoch, index] = tuple(values)
    return found


class TestSteps:
    @settings(max_examples=60, deadline=None)
    @given(
        length=st.integers(1, 120),
        batch=st.integers(1, 40),
        parts=st.integers(1, 7),
        micro=st.one_of(st.none(), st.integers(1, 9)),
        drop_last=st.booleans(),
        first=st.integers(0, 12),
    )
    def test_all_parts_together_hold_the_global_batch(
        self, length: int, batch: int, parts: int, micro: int | None, drop_last: bool, first: int
    ) -> None:
        if drop_last and batch > length:
            return
        job = a_job(batch=batch, steps=first + 4, drop_last=drop_last, seed=3)
        sampler = GlobalBatchSampler(length=length, batch=batch, seed=3, drop_last=drop_last)
        lanes = [Lane(first=part, count=1, parts=parts) for part in range(parts)]
        loaders = [Loader(a_table(length), job, lane, micro=micro, first_step=first) for lane in lanes]
        whole = list(Loader(a_table(length), job, Lane(count=parts, parts=parts), micro=micro, first_step=first))
        counted = 0
        for step, *members in zip(whole, *loaders, strict=True):
            assert step.step == first + counted
            counted += 1
            ids = [sample for member in members for micro_ in member.parts[0] for sample in micro_.ids]
            assert ids == sampler.ids(step.step).tolist()
            assert flat([step])[0][3] == tuple(flat([member])[0][3][0] for member in members)
            assert {member.samples for member in members} == {len(ids)} == {step.samples}
            assert len({len(member.parts[0]) for member in members}) == 1
            for piece in (piece for part in step.parts for piece in part):
                held = piece.batch["id"].tolist()
                assert held == (list(piece.ids) if piece.samples else [ids[0]])
                assert piece.samples == len(piece.ids)
        assert counted == 4

    def test_lengths(self) -> None:
        loader = Loader(a_table(20), a_job(batch=8, epochs=3), Lane(), micro=None)
        assert (loader.length, loader.steps_per_epoch, loader.total_steps) == (20, 3, 9)
        loader = Loader(a_table(20), a_job(batch=8, epochs=3, drop_last=True), Lane(), micro=None)
        assert (loader.steps_per_epoch, loader.total_steps, len(list(loader))) == (2, 6, 6)
        loader = Loader(a_table(20), a_job(batch=8, steps=7), Lane(), micro=None)
        assert [step.epoch for step in loader] == [0, 0, 0, 1, 1, 1, 2]
        loader = Loader(a_table(20), a_job(batch=8, epochs=1), Lane(), micro=None, total_steps=5, first_step=2)
        assert [step.step for step in loader] == [2, 3, 4]
        assert list(Loader(a_table(20), a_job(), Lane(), micro=None, first_step=3)) == []

    def test_data_smaller_than_a_batch(self) -> None:
        assert [step.samples for step in Loader(a_table(5), a_job(batch=8), Lane(), micro=None)] == [5]
        with pytest.raises(SpecError, match="nothing would be left"):
            Loader(a_table(5), a_job(batch=8, drop_last=True), Lane(), micro=None)
        for data, told in (([], "job.data: given data of 0 samples"), (3, "a int")):
            with pytest.raises(SpecError, match=told):
                Loader(data, a_job(), Lane(), micro=None)
        with pytest.raises(SpecError, match=r"job\.evaluate: given data of 0 samples"):
            evaluation_batches([], a_job(), Lane(), micro=None)

    def test_a_transform_keeps_a_row_for_each_sample(self) -> None:
        texts = [{"text": str(place)} for place in range(8)]
        whole = {"batch": 8, "shuffle": False, "transform": lambda batch, keys: {"text": batch["text"][::-1]}}
        (step,) = Loader(texts, a_job(**whole, epochs=1), Lane(first=1, parts=2), micro=2)
        assert [micro.batch["text"] for micro in step.parts[0]] == [["3", "2"], ["1", "0"]]
        with pytest.raises(DataError, match="a row for each sample"):
            list(Loader(a_table(8), a_job(batch=8, transform=lambda batch, keys: keys[1:]), Lane(), micro=None))

    def test_iterating_again_starts_again(self) -> None:
        loader = Loader(a_table(20), a_job(), Lane(), micro=None, first_step=1)
        assert flat(loader) == flat(loader)


class TestFetching:
    def test_table_gives_what_collating_rows_gives(self) -> None:
        table = a_table(40)
        (fast,) = Loader(table, a_job(batch=40, shuffle=False), Lane(), micro=None)
        slow = default_collate([table[index] for index in range(40)])
        assert fast.parts[0][0].batch.keys() == slow.keys()
        for name, column in slow.items():
            torch.testing.assert_close(fast.parts[0][0].batch[name], column, rtol=0, atol=0)

    def test_own_collate_gets_a_list_of_samples(self) -> None:
        job = a_job(batch=8, collate=lambda samples: [int(sample["id"]) for sample in samples], shuffle=False)
        for data in (a_table(8), Subset(a_table(8), list(range(8)))):
            (step,) = Loader(data, job, Lane(), micro=None)
            assert step.parts[0][0].batch == list(range(8))

    def test_wrappers_around_a_table(self) -> None:
        job = a_job(batch=4, shuffle=False)
        (step,) = Loader(Subset(a_table(8), [7, 1, 2, 5]), job, Lane(), micro=None)
        assert step.parts[0][0].batch["id"].tolist() == [7, 1, 2, 5]
        (step,) = Loader(StackDataset(a_table(2), a_table(2)), a_job(batch=2, shuffle=False), Lane(), micro=None)
        assert [column["id"].tolist() for column in step.parts[0][0].batch] == [[0, 1], [0, 1]]
        (step,) = Loader(ConcatDataset([a_table(2), a_table(2)]), job, Lane(), micro=None)
        assert step.parts[0][0].batch["id"].tolist() == [0, 1, 0, 1]

    def test_each_micro_batch_is_collated_by_itself(self) -> None:
        words = [torch.ones(length) for length in (1, 2, 5, 3)]
        job = a_job(batch=4, shuffle=False, collate=torch.nn.utils.rnn.pad_sequence)
        (step,) = Loader(words, job, Lane(), micro=2)
        assert [tuple(micro.batch.shape) for micro in step.parts[0]] == [(2, 2), (5, 2)]

    def test_an_error_names_the_sample(self) -> None:
        class Broken(Augmented):
            def __getitem__(self, index: int) -> dict[str, Any]:
                if index == 5:
                    raise OSError("unreadable")
                return super().__getitem__(index)

        with pytest.raises(OSError, match="unreadable") as caught:
            list(Loader(Broken(8), a_job(), Lane(), micro=None))
        assert caught.value.__notes__ == ["while reading sample 5 of the data"]


class TestTable:
    def test_with_torchs_own_loader(self) -> None:
        loader = torch.utils.data.DataLoader(a_table(4), batch_size=2, collate_fn=Table.collate)
        assert [batch["id"].tolist() for batch in loader] == [[0, 1], [2, 3]]


class TestRandomness:
    def test_a_sample_is_augmented_alike_on_any_parts_and_after_a_resume(self) -> None:
        job = a_job(batch=8, epochs=2, seed=4)
        data = Augmented(20)
        whole = drawn(Loader(data, job, Lane(), micro=None))
        assert len(whole) == 40
        assert len(set(whole.values())) == 40
        for parts, micro in ((2, None), (3, 1), (5, 2)):
            random.seed(parts)
            split: dict[tuple[int, int], tuple[float, ...]] = {}
            for part in range(parts):
                split |= drawn(Loader(data, job, Lane(first=part, parts=parts), micro=micro))
            assert split == whole
        resumed = drawn(Loader(data, job, Lane(), micro=None, first_step=4))
        assert resumed.items() <= whole.items()

    def test_many_at_once_draw_alike_for_the_same_micro_batches(self) -> None:
        job = a_job(batch=8, epochs=1)
        one = drawn(Loader(Many(20), job, Lane(), micro=4))
        torch.manual_seed(99)
        two = drawn(Loader(Many(20), job, Lane(first=0, parts=2), micro=None))
        assert len(two) == 4 + 4 + 2
        assert two.items() <= one.items()

    def test_own_collate_may_draw(self) -> None:
        def masked(samples: list[int]) -> list[float]:
            return [torch.rand(()).item() for _ in samples]

        job = a_job(batch=8, collate=masked)
        runs = []
        for noise in (1, 2):
            torch.manual_seed(noise)
            runs.append([step.parts[0][0].batch for step in Loader(list(range(16)), job, Lane(), micro=None)])
        assert runs[0] == runs[1]
        assert runs[0][0] != runs[0][1]


class TestWorkers:
    def test_workers_change_nothing(self) -> None:
        data = Augmented(21)
        lane = Lane(first=1, count=2, parts=3)
        here = list(Loader(data, a_job(epochs=2), lane, micro=2, first_step=1))
        there = list(Loader(data, a_job(epochs=2, workers=2, prefetch=3), lane, micro=2, first_step=1))
        assert flat(here) == flat(there)
        assert drawn(here) == drawn(there)

    def test_what_they_fail_by_is_one_sentence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(DataError, match=r"^job\.data: sample 3 is None"):
            list(Loader([None if index == 3 else index for index in range(8)], a_job(workers=1), Lane(), micro=None))
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (8, 8))
        with pytest.raises(DataError, match=r"^6 batches ahead .* of 2 tensors each, where no more than 8 files"):
            list(Loader(Augmented(8), a_job(workers=3), Lane(), micro=None))

    def test_a_table_and_a_lambda_reach_the_workers(self) -> None:
        (step,) = Loader(a_table(8), a_job(workers=1, shuffle=False), Lane(), micro=None)
        assert step.parts[0][0].batch["id"].tolist() == list(range(8))
        job = a_job(workers=1, shuffle=False, collate=lambda samples: len(samples))
        (step,) = Loader(list(range(8)), job, Lane(), micro=None)
        assert step.parts[0][0].batch == 8

    def test_closing_half_way_ends_the_processes(self) -> None:
        with closing(iter(Loader(Augmented(64), a_job(workers=2), Lane(), micro=None))) as steps:
            next(steps)
            assert len(multiprocessing.active_children()) == 2
        assert multiprocessing.active_children() == []


class TestEvaluation:
    @pytest.mark.parametrize(("length", "parts", "micro"), [(21, 1, None), (21, 4, 2), (3, 4, None), (16, 2, 3)])
    def test_each_sample_once_in_order_on_any_parts(self, length: int, parts: int, micro: int | None) -> None:
        job = a_job(batch=8, epochs=3, drop_last=True)
        lanes = [Lane(first=part, parts=parts) for part in range(parts)]
        together = zip(*(evaluation_batches(a_table(length), job, lane, micro=micro) for lane in lanes), strict=True)
        seen: list[int] = []
        for members in together:
            assert len({len(member.parts[0]) for member in members}) == 1
            seen += [sample for member in members for micro_ in member.parts[0] for sample in micro_.ids]
        assert seen == list(range(length))

    def test_draws_alike_each_time_and_with_workers(self) -> None:
        one = drawn(evaluation_batches(Augmented(9), a_job(), Lane(), micro=None))
        random.seed(5)
        two = drawn(evaluation_batches(Augmented(9), a_job(workers=2), Lane(), micro=2))
        assert one == two

    def test_streams_are_refused(self) -> None:
        with pytest.raises(SpecError, match=r"job\.evaluate"):
            evaluation_batches(iter(range(3)), a_job(), Lane(), micro=None)
