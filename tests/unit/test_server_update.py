"""Shards: how they share parameters out, what becomes of gradients, and that what is read stays as it is."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx.config import Plan
from phalanx.parallel.parameter_server import (
    BatchPiece,
    Flat,
    Form,
    Pushed,
    Report,
    Rule,
    Shard,
    StalenessBound,
    Update,
    WorkQueue,
    cut_out,
    partition,
    starved,
)
from phalanx.train.parameter_server import requests
from phalanx.train.parameter_server.requests import RequestHandler
from phalanx.train.parameter_server.server_group import Patience


def weights(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def shard(rule: Rule | None = None, lr: float = 0.5, **optimizer: Any) -> Shard:
    def make(named: Mapping[str, torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(named.values(), lr=lr, **optimizer)

    return Shard(weights(a=(3, 2), b=(4,)), make, rule or Rule())


def gradient(of: Shard, value: float) -> Flat:
    flat = of.blank()
    for one in flat.whole:
        one.fill_(value)
    return flat


def values(of: Shard) -> torch.Tensor:
    return torch.cat([one.detach().reshape(-1).clone() for one in of.parameters.values()])


class TestPartition:
    SHAPES = weights(embedding=(500, 16), block=(64, 16), bias=(64,), head=(16, 500), gain=())

    @pytest.mark.parametrize("servers", [1, 2, 3, 5])
    def test_every_row_is_on_one_server_and_loads_are_even(self, servers: int) -> None:
        found = partition(self.SHAPES, servers, cut=True)
        for name, tensor in self.SHAPES.items():
            parts = sorted((one for mine in found for one in mine if one.name == name), key=lambda one: one.start)
            whole = torch.cat([cut_out(tensor, one) for one in parts]) if tensor.dim() else tensor
            assert torch.equal(whole, tensor)
        loads = [sum(cut_out(self.SHAPES[one.name], one).nbytes for one in mine) for mine in found]
        even = sum(loads) / servers
        assert max(loads) <= max(1.25 * even, even + 500 * 4)

    def test_a_server_that_would_hold_nothing_is_a_problem(self) -> None:
        few = weights(a=(3, 2), b=(4,))
        assert starved(few, Plan.parse("server=2 dp=2"), cut=False) == []
        (problem,) = starved(few, Plan.parse("server=3 dp=2"), cut=False)
        assert (problem.where, problem.fix) == ("plan.server", "server=2 dp=2")


def test_pieces_add_up_once_each() -> None:
    one = shard()
    before = values(one)
    assert one.push(Pushed(step=0, part=0), gradient(one, 1.0))
    assert not one.push(Pushed(step=0, part=0), gradient(one, 9.0))
    assert one.push(Pushed(step=0, part=1), gradient(one, 2.0))
    assert one.prepare(0, [0, 1]) == pytest.approx(10 * 9.0)
    one.apply(Update(step=0, scale=0.5, rate=0.1))
    assert torch.allclose(values(one), before - 0.5 * 0.1 * 1.5)
    assert not one.push(Pushed(step=0, part=1), gradient(one, 2.0)), "its step is applied"
    assert one.version == 1


@pytest.mark.parametrize("ahead", [False, True])
def test_what_is_being_read_stays_as_it_is(ahead: bool) -> None:
    one = shard(Rule(ahead=ahead))
    with one.values() as (version, flat):
        before = [each.clone() for each in flat.whole]
        one.push(Pushed(step=0, part=0), gradient(one, 1.0))
        one.prepare(0, [0])
        one.apply(Update(step=0, scale=1.0))
        assert version == 0
        assert all(torch.equal(each, then) for each, then in zip(flat.whole, before, strict=True))
    with one.values() as (version, flat):
        assert version == 1
        assert torch.equal(torch.cat([flat.named[name].reshape(-1) for name in one.parameters]), values(one))


def report(worker: int, version: int = 0, seconds: float = 1.0) -> Report:
    return Report(worker=worker, version=version, gradient_sums={"loss": (1.0, 2.0)}, samples=2, seconds=seconds)


def dealer(staleness: float = 0, *, parts: int = 2, limit: int = 10, backup: int = 0, after: int = 0) -> WorkQueue:
    return WorkQueue(
        lambda step: [2] * parts,
        first=0,
        limit=limit,
        pace=StalenessBound(staleness=staleness, backup=backup, after=after),
    )


@pytest.mark.parametrize("staleness", [1, math.inf])
def test_the_first_steps_may_be_synchronous(staleness: float) -> None:
    books = dealer(staleness, parts=1, after=3)
    assert [books.ask(0), books.ask(1)] == [BatchPiece(0, 0), None]
    assert books.put(0, BatchPiece(0, 0), report(0))
    books.applied(0)
    assert [books.ask(0), books.ask(1)] == [BatchPiece(1, 0), None]
    assert books.put(0, BatchPiece(1, 0), report(0, version=1))
    books.applied(1)
    assert [books.ask(0), books.ask(1)] == [BatchPiece(2, 0), BatchPiece(3, 0)]


def test_a_piece_counts_once() -> None:
    books = dealer(0)
    piece = books.ask(0)
    assert piece is not None
    assert books.put(0, piece, report(0))
    assert not books.put(1, piece, report(1))
    assert not books.put(1, BatchPiece(7, 0), report(1)), "of a step that was never opened"


def test_a_lost_workers_piece_goes_to_others() -> None:
    books = dealer(0)
    books.ask(0)
    lost = books.ask(1)
    assert books.ask(2) is None
    books.leave(1)
    assert books.ask(2) == lost


def test_a_silent_workers_piece_goes_to_others_and_whoever_is_first_counts() -> None:
    books = dealer(0)
    books.ask(0)
    piece = books.ask(1)
    assert piece is not None
    books.silent(1)
    assert books.ask(2) == piece
    assert books.put(1, piece, report(1))
    assert not books.put(2, piece, report(2))
    books.returned(1)
    assert books.ask(1) is None


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_gradient_lacks_more_updates_than_the_plan_allows(staleness: int) -> None:
    rng, books, seen = random.Random(staleness), dealer(staleness, parts=3, limit=40), []
    holding: dict[int, tuple[BatchPiece, int]] = {}
    while not books.at_rest:
        worker = rng.randrange(4)
        if worker in holding:
            piece, version = holding.pop(worker)
            books.put(worker, piece, report(worker, version))
        elif piece := books.ask(worker):
            holding[worker] = (piece, books.version)
        while (step := books.ready()) is not None:
            assert step == books.version, "updates come in the order of steps"
            reports, _ = books.applied(step)
            seen += [books.version - 1 - one.version for one in reports.values()]
    assert len(seen) == 40 * 3
    assert max(seen) <= staleness
    assert staleness == 0 or max(seen) > 0


def test_without_a_bound_steps_are_applied_as_they_are_complete() -> None:
    books = dealer(math.inf, parts=1, limit=3)
    slow, fast = books.ask(0), books.ask(1)
    assert fast is not None
    books.put(1, fast, report(1))
    assert books.ready() == 1
    books.applied(1)
    assert (books.floor, books.done, books.version) == (0, {1}, 1)
    assert books.ask(1) == BatchPiece(2, 0)
    assert slow is not None
    books.put(0, slow, report(0))
    books.applied(0)
    assert (books.floor, books.done) == (2, set())


def test_backup_workers_are_not_waited_for() -> None:
    books = dealer(0, parts=3, backup=1)
    pieces = [books.ask(worker) for worker in range(3)]
    for worker in (0, 2):
        piece = pieces[worker]
        assert piece is not None
        books.put(worker, piece, report(worker))
    assert books.ready() == 0
    assert pieces[1] is not None
    assert not books.put(1, pieces[1], report(1)), "the step is complete"
    assert books.applied(0)[1] == 1


DATA = {"length": 64, "order": "", "files": ""}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(now=1000.0)
    made.monotonic = lambda: made.now
    monkeypatch.setattr(requests, "time", made)
    return made


def looked(clock: SimpleNamespace, *pauses: float) -> list[str]:
    """What becomes of a worker that has a piece and is not heard of, by looks after each of these pauses."""
    queue = WorkQueue(lambda step: [8], first=0, limit=4, pace=StalenessBound())
    handler = RequestHandler(queue, DATA, Form(), Patience(silent=5.0, pieces=0.0, stuck=60.0), b"")
    worker: Any = SimpleNamespace(heard=clock.now, close=lambda: None)
    handler.connected(0, worker, DATA)
    queue.ask(0)
    for pause in pauses:
        clock.now += pause
        handler.look()
    return [told["state"] for told in handler.happened]


def test_who_is_not_heard_of_is_silent_and_then_lost(clock: SimpleNamespace) -> None:
    assert looked(clock, *[0.2] * 20) == ["joined"]
    assert looked(clock, *[0.2] * 30) == ["joined", "silent"]
    assert looked(clock, *[0.2] * 310) == ["joined", "silent", "lost"]


def test_after_a_stop_of_its_own_it_reads_first_what_came(clock: SimpleNamespace) -> None:
    assert looked(clock, 0.2, 100.0) == ["joined"]
    assert looked(clock, 0.2, 6.0, 0.2) == ["joined", "silent"]
    assert looked(clock, 6.0, 6.0) == ["joined", "silent"], "one that is always late looks all the same"
