"""Workers that wait for others at their start say for which; they give up after the timeout, and say why."""

from __future__ import annotations

import os
import socket
import threading

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from phalanx.comm import Place, meet, roll_call
from phalanx.comm.roll_call import meet_all
from phalanx.errors import RunError


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(roll_call, "_SAYS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def place(rank: int, meeting: str, *, agent: bool = False) -> Place:
    return Place(rank=rank, world_size=3, store="env://", meeting=meeting, timeout=1.0, agent=agent)


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
        threading.Timer(0.2 * rank, lambda rank=rank: found.append(meet_all(place(rank, meeting)))) for rank in (1, 2)
    ]
    for one in late:
        one.start()
    found.append(meet_all(place(0, meeting)))
    for one in late:
        one.join()
    assert len(found) == 3


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
