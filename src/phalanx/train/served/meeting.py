"""How servers are found, and how long anybody waits for anybody."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple, final

from phalanx.comm import Place
from phalanx.comm.process_group import meet


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """Seconds that are waited, and for what.

    Attributes:
        beat: between two signs of life of a worker.
        silent: without one, after which a worker's piece is dealt to others, beside ``pieces`` times as long as a
            piece takes in the median.
        pieces: see ``silent``.
        answer: for a peer that is connected to say anything at all.
        task: for a server to write a snapshot, go back to one, or send all it has.
        back: for a server that is gone to be there again, and for any worker where there is none.
        parting: for workers to say good-bye.
    """

    beat: float = 0.5
    silent: float = 5.0
    pieces: float = 4.0
    answer: float = 60.0
    task: float = 600.0
    back: float = 60.0
    parting: float = 10.0


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int
    generation: int


@final
class Directory:
    """The servers' addresses, in the store of all processes of the run. One thread uses it."""

    def __init__(self, place: Place) -> None:
        self._store = meet(place)

    def publish(self, index: int, address: Address) -> None:
        """Say where server ``index`` is from now on."""
        self._store.set(_key(index), json.dumps(address))

    def find(self, index: int) -> Address | None:
        """Where server ``index`` said last that it is."""
        if not self._store.check([_key(index)]):
            return None
        return Address(*json.loads(self._store.get(_key(index))))

    def finish(self) -> None:
        """Say that the run is over: nobody has to look for servers any more."""
        self._store.set(_OVER, "1")

    @property
    def over(self) -> bool:
        """Whether the run is over."""
        return self._store.check([_OVER])


_OVER = "phalanx/server/over"


def _key(index: int) -> str:
    return f"phalanx/server/{index}"
