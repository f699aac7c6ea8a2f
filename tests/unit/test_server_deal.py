"""The coordinator's books: which piece goes to whom, what counts, when a step is complete, and going back."""

from __future__ import annotations

import math
import random

import pytest

from phalanx.parallel.parameter_server import BatchPiece, Report, StalenessBound, WorkQueue

pytestmark = pytest.mark.quick


def report(worker: int, version: int = 0, seconds: float = 1.0) -> Report:
    return Report(worker=worker, version=version, gradient_sums={"loss": (1.0, 2.0)}, samples=2, seconds=seconds)


def dealer(staleness: float = 0, *, parts: int = 2, limit: int = 10, backup: int = 0, after: int = 0) -> WorkQueue:
    return WorkQueue(
        lambda step: [2] * parts,
        first=0,
        limit=limit,
        pace=StalenessBound(staleness=staleness, backup=backup, after=after),
    )


def test_the_oldest_step_goes_first_and_none_is_dealt_twice() -> None:
    books = dealer(1)
    assert [books.ask(worker) for worker in range(4)] == [
        BatchPiece(0, 0),
        BatchPiece(0, 1),
        BatchPiece(1, 0),
        BatchPiece(1, 1),
    ]
    assert books.ask(4) is None, "step 2 lacks 2 updates"


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


def test_no_staleness_is_synchronous() -> None:
    books = dealer(0)
    first, second = books.ask(0), books.ask(1)
    assert first is not None
    assert second is not None
    assert books.put(0, first, report(0))
    assert books.ask(0) is None
    assert books.ready() is None
    assert books.put(1, second, report(1))
    assert books.ready() == 0
    reports, dropped = books.applied(0)
    assert ([one.worker for one in reports.values()], dropped, books.version) == ([0, 1], 0, 1)
    assert books.ask(0) == BatchPiece(1, 0)


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


def test_who_asks_gives_up_what_it_held() -> None:
    books = dealer(0)
    first = books.ask(0)
    assert books.ask(0) == first


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


def test_a_short_batch_leaves_pieces_out() -> None:
    books = WorkQueue(lambda step: (1, 0, 0), first=0, limit=1, pace=StalenessBound(backup=1))
    piece = books.ask(0)
    assert piece == BatchPiece(0, 0)
    assert books.ask(1) is None
    books.put(0, piece, report(0))
    assert books.ready() == 0


def test_a_limit_lets_what_is_open_drain() -> None:
    books = dealer(4, parts=1, limit=2)
    pieces = [books.ask(0), books.ask(1)]
    assert books.ask(2) is None
    for worker, piece in enumerate(pieces):
        assert piece is not None
        books.put(worker, piece, report(worker))
        books.applied(piece.step)
    assert books.at_rest
    books.limit = 3
    assert books.ask(2) == BatchPiece(2, 0)


def test_going_back_deals_anew_but_for_what_was_done() -> None:
    books = dealer(math.inf, parts=1, limit=6)
    for worker in range(4):
        books.ask(worker)
    books.restore(1, [2])
    assert books.version == 2
    assert [books.ask(worker) for worker in range(3)] == [BatchPiece(1, 0), BatchPiece(3, 0), BatchPiece(4, 0)]
