"""Uneven shares and other ways to keep replicas together: their texts, what is wrong, and shares that follow speed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from law_rows import in_one_test
from phalanx.comm import Place
from phalanx.config import Job, Plan
from phalanx.config.plan_rules import share_problems
from phalanx.config.sync import split_by_weight
from phalanx.data import Lane, Loader, StepBatch, Table
from phalanx.device_kinds import host
from phalanx.errors import RefusedError, SpecError
from phalanx.parallel import RankHoldings
from phalanx.train import uneven_shares
from phalanx.train.uneven_shares import Sharing, Stopwatch

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

    def step(self, closure: Any = None) -> None:
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
    @in_one_test("backward", [True, False])
    def test_evaluation_does_not_count(self, clock: list[float], backward: bool) -> None:
        held, optimizer = model(clock)
        watch = Stopwatch(held, optimizer, host(), backward=backward)
        with torch.no_grad():
            held.module(torch.ones(3, 2))
        assert watch.lap().passes == 0.0


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


@in_one_test(
    ("text", "told"),
    [
        ("dp=4 sync=local every=32", "dp=4 sync=local every=32"),
        ("dp=4 sync=diloco every=100 outer=nesterov", "dp=4 sync=diloco every=100"),
        ("dp=4,sync=diloco,every=100,outer=sgd", "dp=4 sync=diloco every=100 outer=sgd"),
        ("server=2 dp=4 staleness=4", "dp=4 server=2 staleness=4"),
        ("dp=2,shares=3,1,micro=2", "dp=2 micro=2 shares=3,1"),
        ("dp=2 shares=3, 1", "dp=2 shares=3,1"),
        (
            "dp=4 sync=diloco every=9 outer=sgd outer_lr=0.5",
            "dp=4 sync=diloco every=9 outer=sgd outer_lr=0.5",
        ),
        ("dp=4 server=2 staleness=unbounded", "dp=4 server=2 staleness=unbounded"),
        ("dp=4 server=2 staleness=2 after=9", "dp=4 after=9 server=2 staleness=2"),
        ("dp=2 compress=topk:0.02", "dp=2 compress=topk:0.02"),
        ("dp=2 fsdp=4 shares=auto", "dp=2 fsdp=4 shares=auto"),
    ],
)
def test_plans_of_shares_round_trip(text: str, told: str) -> None:
    plan = Plan.parse(text)
    assert str(plan) == told
    assert Plan.parse(told) == plan == Plan.from_toml(plan.to_toml())


def test_what_is_not_given_follows_from_what_is() -> None:
    plan = Plan()
    assert (plan.sync, plan.every, plan.outer, plan.server, plan.staleness) == ("each", 1, "none", 0, None)
    assert Plan(dp=2, sync="diloco").outer == "nesterov"
    assert Plan(dp=2, server=1).staleness == 0


@in_one_test(
    ("text", "bound", "exactness"),
    [
        ("dp=4", "", "yes"),
        ("dp=2 shares=3,1", "", "yes"),
        ("dp=4 server=1 staleness=3 compress=int8", "3 updates", "no"),
        ("dp=4 server=1 staleness=unbounded", "any number", "no"),
        ("dp=4 server=1 backup=1", "the slowest worker", "no"),
        ("dp=2 compress=int8", "int8", "within the rounding of int8"),
        ("dp=2 compress=bf16 precision=bf16", "bf16", "within the rounding of bf16"),
        ("dp=2 compress=int8 precision=bf16", "int8", "within the rounding of int8 and bf16"),
        ("dp=2 compress=powersgd:4", "powersgd:4", "no"),
        ("dp=4 sync=local every=32", "32 steps", "no"),
        ("dp=4 sync=diloco every=100 compress=int8", "100 steps", "no"),
    ],
)
def test_what_gives_up_one_devices_result_says_what_bounds_it(text: str, bound: str, exactness: str) -> None:
    plan = Plan.parse(text)
    assert plan.exact == (bound == "")
    assert bound in plan.bound
    assert plan.exactness == exactness
    assert plan.exact_note.startswith(f"exact: {exactness}. " if bound else "")
    assert bool(plan.exact_note) == bool(bound)


@in_one_test(
    ("text", "where"),
    [
        ("every=3", "plan.every"),
        ("dp=2 sync=lokal", "plan.sync"),
        ("fsdp=2 sync=local every=2", "plan.sync"),
        ("dp=2 staleness=1", "plan.staleness"),
        ("dp=2 compress=topk:2", "plan.compress"),
        ("dp=2 fsdp=2 compress=int8", "plan.compress"),
        ("dp=2 server=1 compress=powersgd", "plan.compress"),
        ("compress=int8", "plan.compress"),
        ("dp=2 server=1 backup=2", "plan.backup"),
        ("dp=3 server=1 backup=1 staleness=2", "plan.backup"),
        ("dp=2 after=9", "plan.after"),
        ("dp=2 sync=diloco outer_momentum=1.5", "plan.outer_momentum"),
        ("server=1 fsdp=2", "plan.server"),
        ("server=1 dp=2 sync=local every=2", "plan.server"),
        ("server=1 dp=2 offload=optimizer", "plan.offload"),
        ("dp=2 shares=1.5,1", "plan.shares"),
        ("shares=auto", "plan.shares"),
        ("dp=2 pp=2 shares=auto", "plan.shares"),
        ("dp=2,3", "plan.dp"),
    ],
)
def test_what_is_wrong_names_a_plan_that_is_right(text: str, where: str) -> None:
    with pytest.raises(SpecError) as raised:
        Plan.parse(text)
    assert [problem.where for problem in raised.value.problems] == [where]
    for problem in raised.value.problems:
        Plan.parse(problem.fix if "dp" in problem.fix else f"dp=2 {problem.fix}")


@in_one_test(
    ("total", "each", "counts"),
    [
        (8, (3, 1), (6, 2)),
        (7, (1, 1), (4, 3)),
        (10, (2.5, 1.0), (7, 3)),
        (10, (1.0, 2.0), (3, 7)),
        (1, (3, 1), (1, 0)),
        (30, (0.1, 0.1, 0.1), (10, 10, 10)),
    ],
)
def test_samples_are_dealt_by_the_largest_remainder(total: int, each: tuple[float, ...], counts: tuple[int]) -> None:
    assert split_by_weight(total, each) == counts
    assert sum(counts) == total


def test_shares_give_each_rank_a_sample() -> None:
    assert list(share_problems(Plan.parse("dp=2 shares=3,1"), 8)) == []
    (problem,) = share_problems(Plan.parse("dp=2 shares=100,1"), 8)
    assert (problem.where, problem.fix) == ("plan.shares", "dp=2 shares=auto")
    assert "8,0" in problem.given
    (problem,) = share_problems(Plan.parse("dp=2 fsdp=4 shares=5,1"), 16)
    assert "13,3" in problem.given
    assert "4 samples" in problem.allowed
