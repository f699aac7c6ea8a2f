"""Shares that follow speed: what a rank times, what it has memory for, and when all change together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from phalanx.comm import Place
from phalanx.config import Job, Plan
from phalanx.data import Lane, Loader, StepBatch, Table
from phalanx.device_kinds import host
from phalanx.errors import RefusedError
from phalanx.parallel import RankHoldings
from phalanx.train import uneven_shares
from phalanx.train.uneven_shares import MemoryRoom, Sharing, Stopwatch

pytestmark = pytest.mark.quick


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that only a test lets pass."""
    now = [0.0]
    monkeypatch.setattr(uneven_shares, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


class Slow(nn.Module):
    """A second for each sample forward, two backward, on the test's clock."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1)
        self._clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._clock[0] += len(x)
        found = self.inner(x)
        if found.requires_grad:
            found.register_hook(self._backward)
        return found

    def _backward(self, grad: torch.Tensor) -> None:
        self._clock[0] += 2 * len(grad)


class Slowly(torch.optim.SGD):
    """Half a second a step."""

    clock: list[float]

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.clock[0] += 0.5


def model(clock: list[float]) -> tuple[RankHoldings, torch.optim.Optimizer]:
    module = Slow(clock)
    optimizer = Slowly(module.parameters(), lr=0.1)
    optimizer.clock = clock
    return RankHoldings(module=module, parameters=dict(module.named_parameters())), optimizer


def a_job(**options: Any) -> Job:
    unused: Any = print
    return Job(model=unused, data=unused, loss=unused, optimizer=unused, **{"batch": 16, "steps": 40, **options})


class TestStopwatch:
    def test_from_the_first_forward_to_the_last_gradient(self, clock: list[float]) -> None:
        held, optimizer = model(clock)
        watch = Stopwatch(held, optimizer, host(), backward=True)
        for _ in range(2):
            held.module(torch.ones(3, 2)).sum().backward()
        clock[0] += 100  # others' gradients are waited for
        optimizer.step()
        lap = watch.lap()
        assert (lap.passes, lap.update) == (18.0, 0.5)
        assert (watch.lap().passes, watch.lap().update) == (0.0, 0.0)

    def test_forwards_alone(self, clock: list[float]) -> None:
        held, optimizer = model(clock)
        watch = Stopwatch(held, optimizer, host(), backward=False)
        for _ in range(2):
            held.module(torch.ones(3, 2)).sum().backward()
            clock[0] += 100
        assert watch.lap().passes == 6.0

    @pytest.mark.parametrize("backward", [True, False])
    def test_evaluation_does_not_count(self, clock: list[float], backward: bool) -> None:
        held, optimizer = model(clock)
        watch = Stopwatch(held, optimizer, host(), backward=backward)
        with torch.no_grad():
            held.module(torch.ones(3, 2))
        assert watch.lap().passes == 0.0


class TestRoom:
    @pytest.fixture(autouse=True)
    def _memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(uneven_shares, "memory_bytes", lambda: 10_000)
        monkeypatch.setattr(uneven_shares, "peak_memory", lambda: 4_000)

    def test_by_what_samples_took(self) -> None:
        there = MemoryRoom(host(), workers_here=2, bounded=False)
        assert there.most() == math.inf
        there.took(8)
        assert there.most() == math.inf  # nobody has told what a sample takes
        there.saved(400, 8)
        assert there.most() == 8 + 18  # of 1000 bytes free, 900 over 50

    def test_micro_batches_of_a_stated_size_take_what_they_take(self) -> None:
        there = MemoryRoom(host(), workers_here=2, bounded=True)
        there.took(8)
        there.saved(400, 8)
        assert there.most() == math.inf


class Together:
    """Two ranks of ``dp``, of which this is the first, and the other a times as slow."""

    def __init__(self, clock: list[float], slower: float, **options: Any) -> None:
        self.clock, self.slower = clock, slower
        job, plan = a_job(**options), Plan.parse("dp=2 shares=auto")
        self.loader = Loader(Table(x=torch.ones(400, 2)), job, Lane.of(plan, 0), micro=None)
        self.looks: list[int] = []
        self.step = 0
        self.sharing = Sharing(job, plan, Place(world_size=2), self.loader, 0, self._everyone)
        self.held, self.optimizer = model(clock)
        self.sharing.watch(self.held, self.optimizer, host())

    def _everyone(self, row: list[float]) -> list[list[float]]:
        self.looks.append(self.step)
        return [row, [row[0] * self.slower, row[1], math.inf, row[3] + 2]]

    def run(self) -> Iterator[StepBatch]:
        for batch in self.loader:
            self.step = batch.step
            yield batch
            for micro in batch.parts[0]:
                self.held.module(micro.batch["x"]).sum().backward()
            self.optimizer.step()
            self.sharing.stepped(batch)


class TestSharing:
    def test_shares_move_in_a_step_that_nobody_has_read(self, clock: list[float]) -> None:
        there = Together(clock, 3.0)
        counts = [batch.here for batch in there.run()]
        # warm are steps 2 to 6; the other rank has read two steps further
        assert counts == [8] * 9 + [12] * 31
        first, moved = there.sharing.news()
        assert (first.step, first.shares, first.seconds) == (0, (8, 8), ())
        assert (moved.step, moved.shares, moved.seconds) == (9, (12, 4), (3.0, 9.0))
        assert there.sharing.news() == []
        assert there.looks == [6, 14, 24]

    def test_a_device_that_recovers(self, clock: list[float]) -> None:
        there = Together(clock, 3.0)
        for batch in there.run():
            if batch.step == 20:
                there.slower = 1.0
        assert [shift.shares for shift in there.sharing.news()] == [(8, 8), (12, 4), (8, 8)]

    def test_equal_devices_stay_even(self, clock: list[float]) -> None:
        there = Together(clock, 1.01)
        assert {batch.here for batch in there.run()} == {8}

    def test_a_stream_that_others_read_ahead_is_refused(self) -> None:
        class Numbers(IterableDataset[int]):
            def __iter__(self) -> Iterator[int]:
                return iter(range(40))

        plan, job = Plan.parse("dp=2 shares=auto"), a_job(workers=2)
        loader = Loader(Numbers(), job, Lane.of(plan, 0), micro=None)
        with pytest.raises(RefusedError, match="shares=auto") as caught:
            Sharing(job, plan, Place(world_size=2), loader, 0)
        assert "workers=0" in str(caught.value)
        fixed = Plan.parse("dp=2 shares=3,1")
        loader = Loader(Numbers(), job, Lane.of(fixed, 0), micro=None)
        assert Sharing(job, fixed, Place(world_size=2), loader, 0).news()[0].shares == (12, 4)
