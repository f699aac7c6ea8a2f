"""The lengths of a job's samples: looked at all over the data, the longest for memory, in bounded time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import phalanx as px
from phalanx.config import Plan
from phalanx.forecast import Lengths, forecast
from phalanx.forecast.layouts import Layouts, for_memory, for_time
from phalanx.hardware import cluster
from phalanx.train.traced_job import work_of

SHORT, LONG = 8, 64


class Text(torch.utils.data.Dataset[Tensor]):
    """Samples of ``SHORT`` tokens first, the others of ``LONG``."""

    def __init__(self, short: int, size: int = 200, seconds: float = 0.0) -> None:
        self.short, self.size, self.seconds, self.read = short, size, seconds, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        self.read += 1
        time.sleep(self.seconds)
        return torch.full((SHORT if index < self.short else LONG,), index % 50 + 1)


class Stream(torch.utils.data.IterableDataset[Tensor]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((SHORT if index % 2 else LONG,), index % 50 + 1) for index in range(self.size))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.relu(self.inner(self.table(ids))))


def padded(samples: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


def job(data: Any) -> px.Job:
    return px.Job(
        model=Model,
        data=lambda: data,
        collate=padded,
        loss=lambda output, batch: output.float().square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch=8,
        steps=2,
    )


def activations(data: Any) -> float:
    return forecast(work_of(job(data)), Plan(), cluster("1xA100-80GB")).memory["activations"]


def test_short_samples_at_the_beginning_hide_no_memory() -> None:
    assert activations(Text(short=4)) == pytest.approx(activations(Text(short=0)), rel=0.01)


def test_the_forecast_says_which_lengths_it_saw() -> None:
    (note,) = (one for one in work_of(job(Text(short=100))).profile.notes if "lengths" in one)
    assert note.startswith(f"lengths of 100 samples: {SHORT} to {LONG}, mean 36; longest for memory")
    assert not any("lengths" in one for one in work_of(job(Text(short=0))).profile.notes)


def test_of_a_stream_the_first_hundred_are_looked_at() -> None:
    found = work_of(job(Stream(500))).lengths
    assert found is not None
    assert (len(found.tokens), found.tokens[0], found.longest, found.padded) == (100, SHORT, LONG, True)


def test_slow_data_are_left_after_a_second() -> None:
    data = Text(short=2, seconds=0.3)
    begun = time.monotonic()
    work_of(job(data))
    assert data.read < 20
    assert time.monotonic() - begun < 30


def test_a_stated_length_is_not_looked_for() -> None:
    data = Text(short=100)
    work = work_of(job(data), length=32)
    assert (work.lengths, work.tokens, data.read) == (None, 32, 2)


def test_a_length_that_is_stated_takes_the_place_of_those_that_were_seen() -> None:
    seen = work_of(job(Text(short=100)))
    there = cluster("1xA100-80GB")
    stated = forecast(replace(seen, length=32), Plan(), there)
    alone = forecast(replace(seen, length=32, lengths=None), Plan(), there)
    assert (stated.step, stated.reserved) == (alone.step, alone.reserved)
    assert stated.memory["activations"] < forecast(seen, Plan(), there).memory["activations"]


def test_padded_batches_are_as_long_as_their_longest_sample() -> None:
    seen = (10, 20, 30, 40)
    expected = {1.0: 25.0, 2.0: 31.25, 1000.0: 40.0}  # of two draws: 10/16 + 20 * 3/16 + 30 * 5/16 + 40 * 7/16
    lengths = Lengths(seen, padded=True)
    assert lengths.of_batch(np.array(list(expected))) == pytest.approx(list(expected.values()))
    assert Lengths(seen).of_batch(np.array([1.0, 9.0])) == pytest.approx([25.0, 25.0])


def test_time_is_of_the_mean_and_memory_of_the_longest() -> None:
    layouts = Layouts.of([Plan(), Plan(micro=1)], 4, 10)
    lengths = Lengths((10, 30), padded=False)
    assert for_time(lengths, layouts).length.tolist() == [20.0, 20.0]
    assert for_memory(lengths, layouts).length.tolist() == [30.0, 30.0]
    assert for_time(None, layouts) is layouts
