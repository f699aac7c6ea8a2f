"""All servers as the coordinator speaks to them, how they are found, and how long anybody waits for anybody."""

from __future__ import annotations

import json
import select
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from phalanx.comm import Place
from phalanx.comm.frames import Connection, LostError
from phalanx.comm.process_group import meet
from phalanx.parallel.parameter_server import Kind
from phalanx.train.parameter_server.server import COORDINATOR, Server, receive_tensors
from phalanx.train.parameter_server.shard_store import ServerShare


class ServerLostError(Exception):
    """A server is gone.

    Attributes:
        index: which.
    """

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


@final
class Group:
    """Server 0, which is here, and connections to the others."""

    def __init__(self, servant: Server, servers: int, patience: Patience) -> None:
        self._servant, self._patience = servant, patience
        self._others: dict[int, Connection | None] = dict.fromkeys(range(1, servers))
        self._limit = patience.answer

    @property
    def missing(self) -> list[int]:
        """Servers without a connection."""
        return [index for index, connection in self._others.items() if connection is None]

    def connect(self, index: int, address: Address) -> bool:
        """Whether server ``index`` could be reached at ``address``."""
        try:
            connection = Connection.to(address.host, address.port, patience=self._patience.answer)
            connection.send(Kind.HELLO, {"rank": COORDINATOR})
            connection.receive()
        except OSError:
            return False
        self._others[index], self._limit = connection, 0.0
        return True

    def lose(self, index: int) -> None:
        """Let go of the connection to server ``index``."""
        connection, self._others[index] = self._others[index], None
        if connection:
            connection.close()

    def look(self) -> None:
        """Find out whether a server is gone.

        Raises:
            ServerLostError: if so.
        """
        for index, connection in self._others.items():
            # It speaks only when spoken to: what can be read is the end.
            if connection is None or connection.fileno < 0 or select.select([connection.fileno], [], [], 0)[0]:
                self.lose(index)
                raise ServerLostError(index, "its connection has ended")

    def tell(self, kind: Kind, meta: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Have every server do something, all at once; their answers in the order of servers.

        Raises:
            ServerLostError: if one is gone.
        """
        meta = meta or {}
        self._wait(self._patience.task if kind in (Kind.SNAPSHOT, Kind.RESTORE) else self._patience.answer)
        for index in self._others:
            self._of(index, lambda connection: connection.send(kind, meta))
        answers = [self._servant.obey(kind, meta)]
        answers += [self._of(index, lambda connection: connection.receive()).meta for index in self._others]
        return answers

    def gather(self, what: str) -> list[ServerShare]:
        """What every server has; see ``ShardStore.share``.

        Raises:
            ServerLostError: if one is gone.
        """

        def taken(connection: Connection) -> ServerShare:
            frame = connection.receive()
            return ServerShare(frame.meta["held"], receive_tensors(connection, frame), frame.meta["groups"])

        self._wait(self._patience.task)
        for index in self._others:
            self._of(index, lambda connection: connection.send(Kind.GATHER, {"what": what}))
        return [self._servant.share(what), *(self._of(index, taken) for index in self._others)]

    def close(self) -> None:
        """End all connections."""
        for index in self._others:
            self.lose(index)

    def _wait(self, seconds: float) -> None:
        """How long each answer may take from now on."""
        if seconds != self._limit:
            self._limit = seconds
            for connection in self._others.values():
                if connection:
                    connection.wait_at_most(seconds)

    def _of(self, index: int, call: Any) -> Any:
        connection = self._others[index]
        if connection is None:
            raise ServerLostError(index, "it is not there")
        try:
            return call(connection)
        except LostError as error:
            self.lose(index)
            raise ServerLostError(index, str(error)) from None


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
