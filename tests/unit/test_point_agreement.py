"""Ranks meet at their start, and do what was asked at different moments at the same point."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

import phalanx as px
from phalanx.comm import Place, PointAgreement, meet, roll_call
from phalanx.comm import point_agreement as module
from phalanx.comm.roll_call import meet_all
from phalanx.errors import RunError
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


@pytest.mark.parametrize(("seed", "size"), [(0, 2), (1, 5), (2, 5), (3, 2)])
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
                time.sleep(0.1)  # it has asked
                assert [agreement.pass_point() for _ in range(3)] == [None] * 3  # the point after is nobody's
                agreement.close(finished=True)

        return run

    side_by_side(Short(store, first, 2, iter([]), 0, list), late(1 - first))


@pytest.mark.parametrize("rank", [0, 1])
def test_who_does_not_answer_holds_nobody(rank: int, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is gone, or stopped: the others go on, and find that in their exchanges."""
    monkeypatch.setattr(module, "_PATIENCE", 0.2)
    with PointAgreement(PrefixStore("test", store), rank, 2, lambda: [15, 0]) as agreement:
        time.sleep(0.1)
        assert agreement.pass_point() is None


@pytest.mark.parametrize(("plan", "at"), [("dp=2", 1), ("dp=2 sync=local every=4", 4)])
def test_a_save_by_the_clock_is_of_a_step_after_which_replicas_are_equal(plan: str, at: int, tmp_path: Path) -> None:
    store, saved = HashStore(), list[tuple[int, int]]()
    run = px.RunSpec(job="small", plan=px.Plan.parse(plan), folder=tmp_path, checkpoint_every="0.05s")
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


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(roll_call, "_SAYS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def _own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time that passes only as somebody waits: how long that was does not depend on when this process had a core."""
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(roll_call, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))


def place(rank: int, meeting: str, *, agent: bool = False, timeout: float = 1.0) -> Place:
    return Place(rank=rank, world_size=3, store="env://", meeting=meeting, timeout=timeout, agent=agent)


@pytest.mark.usefixtures("_own_time")
def test_rank_0_names_the_ranks_that_do_not_come(meeting: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunError, match="rank 0 of 3 has waited 1 s for ranks 1, 2, not yet at"):
        meet_all(place(0, meeting))
    said = capfd.readouterr().err
    assert "rank 0 of 3 waits for ranks 1, 2" in said
    assert "env -u RANK -u WORLD_SIZE" in said


@pytest.mark.parametrize(("agent", "who"), [(False, "rank 0"), (True, "torchrun's agent")])
def test_others_say_that_nobody_serves_the_store(agent: bool, who: str, meeting: str) -> None:
    with pytest.raises(RunError, match=f"for {who}, which does not answer at {meeting}") as raised:
        meet_all(place(1, meeting, agent=agent))
    assert ("env -u RANK" in str(raised.value)) == (not agent)


def test_ranks_that_come_late_are_met(meeting: str) -> None:
    found: list[object] = []
    late = [
        threading.Timer(0.2 * rank, lambda rank=rank: found.append(meet_all(place(rank, meeting, timeout=30.0))))
        for rank in (1, 2)
    ]
    for one in late:
        one.start()
    found.append(meet_all(place(0, meeting, timeout=30.0)))
    for one in late:
        one.join()
    assert len(found) == 3


@pytest.fixture
def agent() -> tuple[str, TCPStore]:
    """A store that outlives those who meet there: where it is, and itself."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return f"127.0.0.1:{server.port}", server


def meeting_at_once(places: Sequence[Place]) -> dict[int, str]:
    """What became of each: the first line of what it raised, or nothing."""
    said: dict[int, str] = {}

    def meets(one: Place) -> None:
        try:
            meet_all(one)
            said[one.rank] = ""
        except RunError as error:
            said[one.rank] = str(error).partition("\n")[0]

    threads = [threading.Thread(target=meets, args=(one,)) for one in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


@pytest.mark.usefixtures("meeting")
@pytest.mark.parametrize("there", [(0, 1, 2), (0, 1), (1, 2)], ids=["all had met", "one never came", "none led"])
def test_who_is_started_again_meets_none_of_those_before(agent: tuple[str, TCPStore], there: tuple[int, ...]) -> None:
    """Agents do not say which start it is: those of two hosts count differently, each the failures of its own."""
    where, _ = agent
    patience = 30.0 if len(there) == 3 else 1.0  # in which nobody else comes
    said = meeting_at_once([place(rank, where, agent=True, timeout=patience) for rank in there])
    assert all(bool(one) == (len(there) < 3) for one in said.values())
    before = dict(roll_call._words)
    roll_call._words.clear()
    others = [place(rank, where, agent=True, timeout=30.0) for rank in (0, 1, 2)]
    first = threading.Timer(0.5, lambda: meet_all(others[0]))  # by then the others have found what stood there before
    first.start()
    assert meeting_at_once(others[1:]) == {1: "", 2: ""}
    first.join()
    assert len(set(roll_call._words.values())) == 1
    assert set(before.values()).isdisjoint(roll_call._words.values())


def test_a_forked_process_meets_through_a_connection_of_its_own() -> None:
    """The one it was forked with is another process's, and may be to a store that is gone since."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    here = Place(world_size=2, store=f"tcp://127.0.0.1:{server.port}")
    ours = meet(here)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if meet(here) is not ours else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert meet(here) is ours
