"""Streams: the same steps on any number of parts, from any step, with any number of workers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from phalanx.config import Job
from phalanx.data import Lane, Loader, StepBatch
from phalanx.errors import DataError, SpecError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def a_job(**options: Any) -> Job:
    unused: Any = print
    options = {"batch": 4, **options}
    if "steps" not in options:
        options.setdefault("epochs", 1)
    return Job(model=unused, data=unused, loss=unused, optimizer=unused, **options)


class Letters:
    """A plain iterable, epoch by epoch in another order, that draws from the global streams."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0
        self.read = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for position in range(self.length):
            self.read += 1
            yield {"value": position + 1000 * self.epoch, "drawn": random.random() + torch.rand(()).item()}


class Seekable(Letters):
    """The same with a way to begin anywhere."""

    start = 0

    def seek(self, position: int) -> None:
        self.start = position

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for position in range(self.start, self.length):
            self.read += 1
            yield {"value": position + 1000 * self.epoch, "drawn": random.random() + torch.rand(()).item()}


class Splitting(IterableDataset[int]):
    """Splits itself among workers where it sees that it is in one, as many streams do."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(20)) if info is None else iter(range(info.id, 20, info.num_workers))


def seen(steps: Iterable[StepBatch]) -> list[tuple[Any, ...]]:
    return [
        (
            step.step,
            step.epoch,
            step.samples,
            [
                [
                    (micro.ids, micro.samples, micro.batch["value"].tolist(), micro.batch["drawn"].tolist())
                    for micro in part
                ]
                for part in step.parts
            ],
        )
        for step in steps
    ]


class TestSteps:
    def test_positions_and_shares(self) -> None:
        loader = Loader(Letters(10), a_job(epochs=2), Lane(first=1, parts=2), micro=1)
        assert (loader.length, loader.steps_per_epoch, loader.total_steps) == (None, None, None)
        found = [
            (step.step, step.epoch, step.samples, [micro.ids for micro in step.parts[0]], values(step))
            for step in loader
        ]
        assert found == [
            (0, 0, 4, [(2,), (3,)], [2, 3]),
            (1, 0, 4, [(6,), (7,)], [6, 7]),
            (2, 0, 2, [(9,)], [9]),
            (3, 1, 4, [(2,), (3,)], [1002, 1003]),
            (4, 1, 4, [(6,), (7,)], [1006, 1007]),
            (5, 1, 2, [(9,)], [1009]),
        ]

    @pytest.mark.parametrize(("parts", "micro"), [(3, 1), (5, 2)])
    def test_parts_together_are_one_device(self, parts: int, micro: int | None) -> None:
        job = a_job(steps=7)
        lanes = [Lane(first=part, parts=parts) for part in range(parts)]
        whole = seen(Loader(Letters(10), job, Lane(count=parts, parts=parts), micro=micro))
        each = [seen(Loader(Letters(10), job, lane, micro=micro)) for lane in lanes]
        for step, *members in zip(whole, *each, strict=True):
            assert step[3] == [member[3][0] for member in members]
        one = seen(Loader(Letters(10), job, Lane(), micro=None))
        samples = [
            [sample for part in step[3] for micro_ in part if micro_[1] for sample in micro_[3]] for step in whole
        ]
        assert samples == [step[3][0][0][3] for step in one]

    def test_steps_go_on_over_passes(self) -> None:
        loader = Loader(Letters(6), a_job(steps=5), Lane(), micro=None)
        assert loader.total_steps == 5
        assert [(step.epoch, values(step)[0]) for step in loader] == [(0, 0), (0, 4), (1, 1000), (1, 1004), (2, 2000)]

    def test_drop_last(self) -> None:
        for length, dropped in ((10, True), (8, False)):  # 8 are two batches: none is left over, and none is empty
            loader = Loader(Letters(length), a_job(epochs=2, drop_last=dropped), Lane(), micro=None)
            assert [(step.epoch, step.samples) for step in loader] == [(0, 4), (0, 4), (1, 4), (1, 4)]

    def test_no_more_is_read_than_the_steps_need(self) -> None:
        data = Letters(1000)
        list(Loader(data, a_job(steps=3), Lane(), micro=None))
        assert data.read == 12

    def test_own_collate_draws_by_position(self) -> None:
        def masked(samples: list[Any]) -> dict[str, torch.Tensor]:
            return {"value": torch.tensor([sample["value"] for sample in samples]), "drawn": torch.rand(1)}

        job = a_job(collate=masked)
        split = seen(Loader(Letters(8), job, Lane(first=1, parts=2), micro=None))
        whole = seen(Loader(Letters(8), job, Lane(), micro=2))
        assert [step[3][0][0] for step in split] == [step[3][0][1] for step in whole]


def values(step: StepBatch) -> list[int]:
    return [value for part in step.parts for micro in part for value in micro.batch["value"].tolist()]


class TestResume:
    @pytest.mark.parametrize("kind", [Letters, Seekable])
    def test_resumed_steps_are_those_of_a_run_without_a_stop(self, kind: type[Letters]) -> None:
        for options in ({"epochs": 3}, {"steps": 8}, {"epochs": 3, "drop_last": True}):
            job = a_job(**options)
            whole = seen(Loader(kind(10), job, Lane(), micro=3))
            for first in (0, 1, 2, 3, 5, 6):
                assert seen(Loader(kind(10), job, Lane(), micro=3, first_step=first)) == whole[first:], (options, first)

    def test_seeking_reads_nothing_twice(self) -> None:
        data = Seekable(1000)
        (step,) = Loader(data, a_job(steps=101), Lane(), micro=None, first_step=100)
        assert step.parts[0][0].ids == (400, 401, 402, 403)
        assert data.read == 4


class TestWorkers:
    @pytest.mark.parametrize(("workers", "options"), [(1, {"epochs": 2}), (2, {"steps": 5})])
    def test_workers_change_nothing(self, workers: int, options: dict[str, Any]) -> None:
        lane = Lane(first=1, count=2, parts=3)
        here = seen(Loader(Letters(10), a_job(**options), lane, micro=1, first_step=1))
        there = seen(Loader(Letters(10), a_job(**options, workers=workers), lane, micro=1, first_step=1))
        assert here == there
        assert len(here) == (5 if "epochs" in options else 4)

    def test_streams_that_split_themselves_by_worker_stay_whole(self) -> None:
        steps = Loader(Splitting(), a_job(workers=2), Lane(), micro=None)
        assert [step.parts[0][0].batch.tolist() for step in steps] == [list(range(k, k + 4)) for k in range(0, 20, 4)]


class TestRefused:
    def test_shuffling(self) -> None:
        with pytest.raises(SpecError, match="shuffle inside it"):
            Loader(Letters(10), a_job(shuffle=True), Lane(), micro=None)

    def test_a_stream_that_can_be_read_once(self) -> None:
        with pytest.raises(DataError, match="pass 2 over the stream"):
            list(Loader(iter(range(10)), a_job(epochs=2), Lane(), micro=None))

    def test_an_empty_stream(self) -> None:
        for kind, options, first in ((Letters, {"epochs": 1}, 0), (Seekable, {"steps": 3}, 1)):
            with pytest.raises(DataError, match="gave no sample"):
                list(Loader(kind(0), a_job(**options), Lane(), micro=None, first_step=first))

    def test_a_stream_shorter_than_a_batch_that_is_dropped(self) -> None:
        with pytest.raises(DataError, match="batch=4"):
            list(Loader(Letters(3), a_job(steps=3, drop_last=True), Lane(), micro=None))


class Node:
    """A node as ``torchdata.nodes`` has them: the iterator of one pass, until it is reset."""

    def __init__(self, source: Any = 6) -> None:
        self.source, self.at = source, 0

    def reset(self, initial_state: dict[str, int] | None = None) -> None:
        self.at = (initial_state or {"at": 0})["at"]

    def get_state(self) -> dict[str, int]:
        return {"at": self.at}

    state_dict = get_state

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at == self.source:
            raise StopIteration
        self.at += 1
        return self.at - 1


class NodeLoader:
    """A ``torchdata.nodes.Loader``: passes over a node."""

    def __init__(self, root: Node) -> None:
        self.root, self.state = root, dict[str, int]()

    def __iter__(self) -> Iterator[int]:
        self.root.reset(self.state or None)
        self.state = {}
        return self.root

    def state_dict(self) -> dict[str, int]:
        return self.root.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


class TestNodes:
    @pytest.mark.parametrize(("made", "workers"), [(Node, 0), (Node, 2), (lambda: NodeLoader(Node()), 2)])
    def test_each_pass_begins_at_the_begin(self, made: Any, workers: int) -> None:
        steps = list(Loader(made(), a_job(epochs=2, workers=workers), Lane(), micro=None))
        assert [step.parts[0][0].batch.tolist() for step in steps] == [[0, 1, 2, 3], [4, 5]] * 2
        (step,) = Loader(made(), a_job(epochs=2, workers=workers), Lane(), micro=None, first_step=3, total_steps=4)
        assert step.parts[0][0].batch.tolist() == [4, 5]
