"""Ranks that are asked at different moments, and at different paces, do what was asked at the same point."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from torch.distributed import HashStore, PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

import phalanx as px
from phalanx.comm import Place, PointAgreement
from phalanx.comm import point_agreement as module
from phalanx.comm.roll_call import LOST
from phalanx.train.interruptions import Interruptions


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PERIOD", 0.01)


@pytest.fixture
def store() -> Iterator[Store]:
    yield HashStore()
    assert not [thread for thread in threading.enumerate() if thread.name == "phalanx-agreement"]


def side_by_side(*ranks: Callable[[], None]) -> None:
    """Each in a thread of its own; what one raises is raised."""
    raised: list[BaseException] = []

    def run(rank: Callable[[], None]) -> None:
        try:
            rank()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank waits for ever"
    if raised:
        raise raised[0]


class Rank:
    """Passes points until it is stopped; ``together`` is called before each."""

    def __init__(
        self, store: Store, rank: int, size: int, pauses: Iterator[float], asks_at: int, together: Callable[[], object]
    ):
        self.passed, self.found, self._asks_at = 0, list[tuple[int, list[int]]](), asks_at
        self._store, self._rank, self._size, self._pauses, self._together = store, rank, size, pauses, together

    def __call__(self) -> None:
        asked = False

        def wanted() -> list[int]:
            return [self._rank + 1 if asked and not self.found else 0, 0]

        with PointAgreement(PrefixStore("test", self._store), self._rank, self._size, wanted) as agreement:
            for point in count(1):  # one that came to an end could do so while another is held up before it asks
                self._together()  # what ranks exchange in a step
                time.sleep(next(self._pauses))
                asked = asked or point == self._asks_at
                if numbers := agreement.pass_point():
                    self.found.append((point, numbers))
                    return


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("size", [2, 5])
def test_all_stop_at_the_same_point_however_fast_they_are(seed: int, size: int, store: Store) -> None:
    generator = random.Random(seed)
    asking = generator.randrange(size)
    barrier = threading.Barrier(size)
    together: Callable[[], object] = barrier.wait if seed % 2 else lambda: None  # or replicas that step by themselves
    ranks = [
        Rank(
            store,
            rank,
            size,
            (generator.uniform(0.0, 0.003) * (1 + rank) for _ in iter(int, 1)),
            generator.randrange(1, 40) if rank == asking or seed % 3 == 0 else -1,
            together,
        )
        for rank in range(size)
    ]
    side_by_side(*ranks)
    (found,) = {(point, *numbers) for rank in ranks for point, numbers in rank.found}
    assert all(len(rank.found) == 1 for rank in ranks)
    assert found[1] == asking + 1 or seed % 3 == 0  # of those that had asked by then the largest


def test_work_that_gets_slower_is_stopped_at_its_next_point(store: Store) -> None:
    """However many points went by in a moment before: none is counted ahead."""

    def paces() -> Iterator[float]:
        yield from (0.0 for _ in range(200))
        yield from (0.2 for _ in iter(int, 1))

    barrier = threading.Barrier(2)
    ranks = [Rank(store, rank, 2, paces(), 201 if rank else -1, barrier.wait) for rank in range(2)]
    side_by_side(*ranks)
    (point,) = {rank.found[0][0] for rank in ranks}
    assert 201 < point <= 204


@pytest.mark.parametrize("first", [0, 1])
def test_who_has_passed_all_points_holds_nobody(first: int, store: Store) -> None:
    class Short(Rank):
        def __call__(self) -> None:
            with PointAgreement(PrefixStore("test", store), self._rank, 2, lambda: [0, 0]) as agreement:
                for _ in range(3):
                    assert agreement.pass_point() is None
                agreement.close(finished=True)

    def late(rank: int) -> Callable[[], None]:
        def run() -> None:
            with PointAgreement(PrefixStore("test", store), rank, 2, lambda: [15, 0]) as agreement:
                began = time.monotonic()
                time.sleep(0.1)  # it has asked
                assert [agreement.pass_point() for _ in range(3)] == [None] * 3  # the point after is nobody's
                agreement.close(finished=True)
                assert time.monotonic() - began < 2

        return run

    side_by_side(Short(store, first, 2, iter([]), 0, list), late(1 - first))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_who_does_not_answer_holds_nobody_for_long(
    rank: int, known: bool, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is gone, which the launcher may know, or stopped: the others go on, and find that in their exchanges."""
    monkeypatch.setattr(module, "_PATIENCE", 30.0 if known else 0.2)
    if known:
        store.set(LOST, "1")
    with PointAgreement(PrefixStore("test", store), rank, 2, lambda: [15, 0]) as agreement:
        time.sleep(0.1)
        began = time.monotonic()
        assert agreement.pass_point() is None
        assert time.monotonic() - began < 5


def test_who_is_let_go_and_who_decides_late_go_on_alike(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one rank settles counts for all: there are no two outcomes of a round."""
    monkeypatch.setattr(module, "_PERIOD", 60.0)
    with (
        PointAgreement(PrefixStore("test", store), 0, 2, lambda: [15, 0]) as first,
        PointAgreement(PrefixStore("test", store), 1, 2, lambda: [15, 0]) as second,
    ):
        for ours, theirs in ((first, second), (second, first)):
            called_off = ours._settle("null")
            assert called_off is None
            assert theirs._settle('{"point": 3, "numbers": [15, 0]}') is None
            ours._round = theirs._round = ours._round + 1


@pytest.mark.parametrize(("plan", "at"), [("dp=2", 1), ("dp=2 sync=local every=4", 4)])
def test_a_save_by_the_clock_is_of_a_step_after_which_replicas_are_equal(plan: str, at: int, tmp_path: Path) -> None:
    store, saved = HashStore(), list[tuple[int, int]]()
    run = px.RunSpec(job="small", plan=px.Plan.parse(plan), folder=tmp_path, checkpoint_every="1s")
    made = threading.Barrier(2)

    def rank(number: int) -> Callable[[], None]:
        def steps() -> None:
            with both[number] as interruptions:
                made.wait()
                for step in range(1, 1000):
                    time.sleep(0.005)
                    if interruptions.reached(step):
                        saved.append((number, step))
                        return

        return steps

    places = [Place(rank=number, world_size=2) for number in range(2)]
    both = [Interruptions(run, place=place, store=store) for place in places]
    side_by_side(rank(0), rank(1))
    (step,) = {step for _, step in saved}
    assert len(saved) == 2
    assert step % at == 0
