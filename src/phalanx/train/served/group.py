"""All servers as the coordinator speaks to them: what it asks of one it asks of all, itself among them."""

from __future__ import annotations

import select
from typing import Any, final

from phalanx.comm.frames import Connection, LostError
from phalanx.parallel.server import Kind
from phalanx.train.served import parcel
from phalanx.train.served.keeper import Share
from phalanx.train.served.meeting import Address, Patience
from phalanx.train.served.servant import COORDINATOR, Servant


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

    def __init__(self, servant: Servant, servers: int, patience: Patience) -> None:
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

    def gather(self, what: str) -> list[Share]:
        """What every server has; see ``Keeper.share``.

        Raises:
            ServerLostError: if one is gone.
        """

        def taken(connection: Connection) -> Share:
            frame = connection.receive()
            return Share(frame.meta["held"], parcel.receive(connection, frame), frame.meta["groups"])

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
