"""Streams that keep their epoch in shared memory, read by processes of which one is ahead."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import Value
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from test_data_stream import a_job

from phalanx.data import Lane, Loader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

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


@pytest.mark.parametrize("made", [shuffled, Counted])
def test_nor_does_a_process_that_shares_the_stream(made: Callable[[], Any]) -> None:
    stream = made()
    alone = rows(Loader(made(), a_job(batch=10, epochs=2), Lane(), micro=None))
    steps = iter(Loader(stream, a_job(batch=10, epochs=2), Lane(), micro=None))
    other = multiprocessing.get_context("fork").Process(target=stream.set_epoch, args=(7,))
    other.start()
    other.join()
    read = [row for step in steps for part in step.parts for micro in part for row in micro.batch["row"].tolist()]
    assert read == alone
    assert int(stream.epoch if made is shuffled else stream.epoch.value) == 7


def test_what_is_no_single_number_stays_shared() -> None:
    stream = Counted()
    stream.table = torch.zeros(5).share_memory_()  # pyright: ignore[reportAttributeAccessIssue]
    loader = Loader(stream, a_job(), Lane(), micro=None)
    assert loader._reader.dataset.table is stream.table  # pyright: ignore
