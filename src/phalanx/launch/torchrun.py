"""Workers that torchrun starts on any hosts: their place, and the store that its agents share.

The one place where torchrun's environment variables are read. The command that a user, or a queue's node, gives to
torchrun is ``torchrun --nproc-per-node 2 --no-python phalanx worker RUN/run.toml``.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from socket import gethostname
from typing import TYPE_CHECKING, final

from phalanx.comm import Place
from phalanx.comm.roll_call import answers, word_of
from phalanx.errors import SpecError
from phalanx.launch.addresses import connect_late, listen_at, own_address
from phalanx.launch.failure import Failure, gave_up
from phalanx.launch.hangs import HangReport, RankStand, state_of

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyrefly: ignore

FORKED = "PHALANX_FORKED"
"""Variable of workers that a launcher has forked: they, and their children, are no workers of torchrun."""
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_PATIENCE = timedelta(seconds=2)  # for torchrun's store


def place_of_this_process() -> Place | None:
    """Return this process's place if torchrun started it as a worker, and have it listen there; else ``None``.

    Raises:
        SpecError: some of torchrun's variables are there and others are missing or no numbers.
    """
    place = place_from_environment()
    if place:
        listen_at(place.host)
        connect_late(place.world_size)
    return place


def place_from_environment() -> Place | None:
    """This process's place among those of torchrun, or ``None`` where torchrun did not start it.

    Raises:
        SpecError: some of torchrun's variables are there and others are missing or no numbers.
    """
    if ("RANK" not in os.environ and "WORLD_SIZE" not in os.environ) or FORKED in os.environ:
        return None
    found = {name: os.environ.get(name, "") for name in (*_NUMBERS, "MASTER_PORT", "MASTER_ADDR")}
    if wrong := {
        name: value for name, value in found.items() if not (value.isdecimal() or (name == "MASTER_ADDR" and value))
    }:
        raise SpecError.of(
            where="environment variables",
            given=", ".join(f"{name}={value or 'nothing'}" for name, value in wrong.items()),
            allowed="what torchrun sets: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT together",
            fix="torchrun --nproc-per-node 2 --no-python phalanx worker RUN/run.toml",
        )
    rank, world_size, local_rank = (int(os.environ[name]) for name in _NUMBERS)
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    beside = int(here) if here.isdecimal() else 0
    master = found["MASTER_ADDR"]
    one_host = beside == world_size or master == "localhost" or master.startswith("127.")
    return Place(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=beside,
        store="env://",
        host=own_address(master, one_host=one_host),
        meeting=f"{master}:{os.environ['MASTER_PORT']}",
        agent=agent_serves(),
        torchrun=started_by_agent(),
    )


AGENT = "PHALANX_AGENT"
"""The variable with the process number of the agent on this node, where a launch has started it."""


def started_by_agent() -> bool:
    """Whether torchrun's agent is this process's parent, or what stands between them ends with it."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def begun_before(number: int) -> bool:
    """Whether the agents that started this worker have started others before it that came to the run ``number``.

    That is so after a failure, and when hosts have come or gone. To be asked by rank 0.
    """
    store = _agent_store()
    if store is None:
        return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return store.check([f"phalanx/begun/{number}"])


def note_begun(number: int) -> None:
    """Let workers that are started instead of this one know that the run ``number`` of this process has its folder."""
    if store := _agent_store():
        store.set(f"phalanx/begun/{number}", "1")


def agent_serves() -> bool:
    """Whether torchrun's own store, which outlives workers, is the one that they meet at."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def claim(place: Place, key: str) -> bool:
    """Whether this worker is the first of its start to ask for ``key``; also true where that cannot be found out.

    It asks torchrun's own store, which outlives the workers, so that it works while they are failing.
    """
    store = _agent_store()
    try:
        return store is None or store.add(f"phalanx/{_start_of(place)}/{key}", 1) == 1
    except RuntimeError:
        return True


def _start_of(place: Place) -> str:
    """What tells this start of all workers from others; before they have met, how often this host's agent counts."""
    return word_of(place.meeting, place.rank) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _agent_store() -> TCPStore | None:
    if not agent_serves():
        return None
    try:
        return _own_connection()
    except RuntimeError:
        return None


def _own_connection() -> TCPStore:
    """To the store that workers meet at, of this thread alone, which soon gives up."""
    from torch.distributed import TCPStore  # pyrefly: ignore

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, is_master=False, timeout=_PATIENCE)


@final
class SharedStands:
    """Where workers on any hosts tell each other where they stand: at the store that they meet at.

    One of a thread: a store's client serves one call at a time.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._store: TCPStore | None = None

    def publish(self, text: str) -> bool:
        """Publish the stand of this rank. Returns True if the store has it."""
        with suppress(RuntimeError):
            if self._store or answers(self._place.meeting):
                self._store = self._store or _own_connection()
                self._store.set(self._key(self._place.rank), text)
                return True
        return False

    def blamed(self, failure: Failure) -> Failure:
        """Return the hang behind the failure of this worker, if it gave up and ranks have published their stacks."""
        stands = self._read() if gave_up(failure) else []
        for rank, stand in enumerate(stands):
            if stand.host == gethostname():  # it may be stopped since
                stands[rank] = replace(stand, state=state_of(stand.pid))
        if not any(stand.frames for stand in stands):
            return failure
        stands[failure.rank] = stands[failure.rank].after(failure)
        return HangReport(stands, self._place.timeout).failure()

    def _read(self) -> list[RankStand]:
        found: list[RankStand] = []
        with suppress(RuntimeError):
            store = self._store = self._store or _own_connection()
            for rank in range(self._place.world_size):
                told = store.get(self._key(rank)) if store.check([self._key(rank)]) else b""
                found.append(RankStand.from_text(told.decode(), rank))
        return found

    def _key(self, rank: int) -> str:
        return f"phalanx/{_start_of(self._place)}/stands/{self._place.number}/{rank}"
