"""Workers that wait for others at their start say for which; they give up after the timeout, and say why."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from phalanx.comm import Place, meet, roll_call
from phalanx.comm.roll_call import meet_all
from phalanx.errors import RunError


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


def test_a_look_is_late_by_a_tenth_of_what_was_waited_and_half_a_second_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paused: list[float] = []
    monkeypatch.setattr(roll_call, "time", SimpleNamespace(monotonic=lambda: 100.0, sleep=paused.append))
    for waited in (0.0, 1.0, 60.0):
        roll_call._pause(100.0 - waited)
    roll_call._pause(100.0, least=2.0)  # of very many ranks
    assert paused == pytest.approx([0.01, 0.1, 0.5, 2.0])


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
def test_who_said_it_was_there_and_was_lost_before_it_was_counted_is_there(agent: tuple[str, TCPStore]) -> None:
    where, server = agent

    def is_lost() -> None:
        server.wait(["phalanx/led"])
        PrefixStore(f"phalanx/start/{server.get('phalanx/led').decode()}", server).set(roll_call._key(1), "its own")

    lost = threading.Thread(target=is_lost)
    lost.start()
    others = [place(rank, where, agent=True, timeout=30.0) for rank in (0, 2)]
    assert meeting_at_once(others) == {0: "", 2: ""}
    lost.join()


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


def test_all_ranks_of_a_large_world_look_no_more_often_than_one_store_answers(
    agent: tuple[str, TCPStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise TimeoutError

    where, server = agent
    many = replace(place(7, where, agent=True), world_size=131_072, timeout=300.0)
    monkeypatch.setattr(roll_call.time, "sleep", pause)
    with pytest.raises(TimeoutError):
        roll_call._follow(many, server, roll_call._RollCall(many))
    assert all(131_072 / seconds <= 20_000 for seconds in pauses), pauses


@pytest.mark.usefixtures("meeting")
def test_of_many_ranks_one_looks_for_those_that_are_missing(
    agent: tuple[str, TCPStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roll_call, "_MANY", 2)
    said = meeting_at_once([place(rank, agent[0], agent=True) for rank in (0, 1)])
    assert "for rank 2, not yet at" in said[0]
    assert "for ranks that are not yet at" in said[1]


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
