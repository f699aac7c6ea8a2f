"""All servers: the coordinator's connections to them, an observer's view, their addresses, and timeouts."""

from __future__ import annotations

import json
import select
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.distributed import PrefixStore  # pyrefly: ignore

from phalanx.checkpoint.sections import MODEL, take_out
from phalanx.comm import Place
from phalanx.comm.frames import Connection, Frame, LostError, ProtocolError
from phalanx.comm.handshake import Identity, Role
from phalanx.comm.listener import Caller
from phalanx.comm.process_group import meet
from phalanx.errors import RunError
from phalanx.parallel import TensorShard
from phalanx.parallel.parameter_server import FrameKind
from phalanx.parallel.parameter_server.protocol import TO_COORDINATOR
from phalanx.train.observer import Scene, State, groups_of
from phalanx.train.parameter_server.server import COORDINATOR, Server, receive_tensors
from phalanx.train.parameter_server.shard_store import ServerShare, ShardStore, put_together


@final
class ServerGroup:
    """Server 0, which is here, and connections to the others."""

    def __init__(self, server: Server, store: ShardStore, servers: int, patience: Patience, secret: bytes) -> None:
        """Take server 0 with its parameters, ``store``."""
        self._server, self._store, self._patience, self._secret = server, store, patience, secret
        self._others: dict[int, Connection] = {}
        self._servers, self._limit = servers, patience.answer

    @property
    def missing(self) -> list[int]:
        """Return servers without a connection."""
        return [index for index in range(1, self._servers) if index not in self._others]

    def connect(self, index: int, address: Address) -> str:
        """Connect to server ``index`` at ``address``. Returns the reason of a failure, or ""."""
        caller, wanted = Caller(identity=COORDINATOR, secret=self._secret), Identity(Role.SERVER, index)
        try:
            connection = caller.call(wanted, address.host, address.port, TO_COORDINATOR, patience=self._patience.answer)
            connection.send(FrameKind.HELLO)
            connection.receive()
        except OSError as error:
            return str(error)
        self._others[index], self._limit = connection, 0.0
        return ""

    def look(self) -> None:
        """Check that no server is gone.

        Raises:
            LostError: if one is.
        """
        for index, connection in self._others.items():
            # It speaks only when spoken to: what can be read is the end.
            if connection.fileno < 0 or select.select([connection.fileno], [], [], 0)[0]:
                raise LostError(f"the connection to server {index} was lost: it has ended")

    def tell(self, kind: FrameKind, meta: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Send an order to every server at once; return their answers in the order of servers.

        Raises:
            LostError: if one is gone.
        """
        meta = meta or {}
        self._wait(self._patience.answer)
        for index in self._others:
            self._of(index, lambda connection: connection.send(kind, meta))
        here = self._server.obey(kind, meta)
        return [here, *(self._of(index, lambda connection: _answer(connection, kind)).meta for index in self._others)]

    def part(self) -> dict[int, dict[str, Any]]:
        """Tell every server that all is done; return the answers of the remaining ones."""
        self._wait(self._patience.answer)
        for index in self._others:
            with suppress(LostError):
                self._of(index, lambda connection: connection.send(FrameKind.END, {}))
        answers = {0: self._server.obey(FrameKind.END, {})}
        for index in self._others:
            with suppress(LostError):
                answers[index] = self._of(index, lambda connection: _answer(connection, FrameKind.END)).meta
        return answers

    def gather(self, what: str) -> list[ServerShare]:
        """Return every server's share; see ``ShardStore.share``.

        Raises:
            LostError: if one is gone.
        """

        def taken(connection: Connection) -> ServerShare:
            frame = _answer(connection, FrameKind.GATHER)
            return ServerShare(frame.meta["held"], receive_tensors(connection, frame), frame.meta["states"])

        self._wait(self._patience.task)
        for index in self._others:
            self._of(index, lambda connection: connection.send(FrameKind.GATHER, {"what": what}))
        return [self._store.share(what), *(self._of(index, taken) for index in self._others)]

    def close(self) -> None:
        """End all connections."""
        for connection in self._others.values():
            connection.close()

    def _wait(self, seconds: float) -> None:
        if seconds != self._limit:
            self._limit = seconds
            for connection in self._others.values():
                connection.wait_at_most(seconds)

    def _of(self, index: int, call: Any) -> Any:
        try:
            return call(self._others[index])
        except ProtocolError:
            raise
        except LostError as error:
            raise LostError(f"the connection to server {index} was lost: {error}") from None


def _answer(connection: Connection, kind: FrameKind) -> Frame:
    frame = connection.receive()
    if frame.kind != kind:
        raise ProtocolError(f"{FrameKind(frame.kind).name} came where {kind.name} was expected")
    return frame


@final
class ServerScene(Scene):
    """The tensors of all servers. Workers, which receive copies, are not included.

    Attributes:
        scale: the factor that turns the servers' sums into gradients.
        stepped_with: whether gradients are the optimizers' inputs, and no longer the summed ones.
    """

    replica = 0

    def __init__(self, store: ShardStore, group: ServerGroup, notes: list[str]) -> None:
        self._store, self._group, self.notes = store, group, notes
        self.slices = dict[str, TensorShard]()
        self.scale, self.stepped_with = 1.0, False

    @property
    def modules(self) -> list[nn.Module]:
        return [self._store.layout.module]

    def values(self) -> Mapping[str, torch.Tensor]:
        module = self._store.layout.module
        frozen = {name: tensor for name, tensor in module.named_parameters() if not tensor.requires_grad}
        return {**frozen, **self._gathered("parameters")}

    def stepped(self) -> Mapping[str, torch.Tensor]:
        return {}

    def buffers(self) -> Mapping[str, torch.Tensor]:
        return {**dict(self._store.layout.module.named_buffers()), **self._store.statistics.named}

    def gradients(self) -> Mapping[str, torch.Tensor]:
        if self.stepped_with:
            return self._gathered("used")
        return {name: tensor * self.scale for name, tensor in self._gathered("gradients").items()}

    def state(self) -> State:
        tensors, states = put_together(self._group.gather("everything"), self._store.layout.parameters)
        return {name: _filled(state, tensors) for name, state in states.items()}

    def groups(self) -> list[tuple[list[str], dict[str, Any]]]:
        """Return those of server 0, with its parameters."""
        shard = self._store.shard
        return groups_of(shard.optimizer, shard.parameters)

    def from_every_process(self, value: Any) -> list[Any]:
        return [value]

    def _gathered(self, what: str) -> dict[str, torch.Tensor]:
        found, _ = put_together(self._group.gather(what), self._store.layout.parameters)
        return take_out(MODEL, found)


def _filled(state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {
        key: tensors[value["$tensor"]] if isinstance(value, dict) and "$tensor" in value else value
        for key, value in state.items()
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """Timeouts in seconds.

    Attributes:
        beat: between two heartbeats of a worker.
        silent: without a heartbeat, after which a worker's piece is assigned to others; also after ``pieces`` times the
            median duration of a piece.
        stuck: without progress, or any heartbeat, after which a worker counts as lost.
        answer: for a connected peer to answer.
        task: for a server to send all it has.
        back: for every server to come, at the start.
        parting: for workers to leave.
    """

    beat: float = 0.5
    silent: float = 5.0
    pieces: float = 4.0
    stuck: float = 600.0
    answer: float = 60.0
    task: float = 600.0
    back: float = 60.0
    parting: float = 10.0


def gone(what: str) -> RunError:
    """Return the error for a run that cannot continue, because of ``what``."""
    return RunError(f"{what}\n    try: resume=True, to resume from the last checkpoint")


class Address(NamedTuple):
    """The address of a listening server."""

    host: str
    port: int


@final
class Directory:
    """The servers' addresses, in the store of all processes, beside those of runs before it. One thread uses it."""

    def __init__(self, place: Place) -> None:
        self._store = PrefixStore(f"phalanx/server/{place.number}", meet(place))
        self._looked, self._stop = 0.0, 0

    def publish(self, index: int, address: Address) -> None:
        """Publish the address of server ``index``."""
        self._store.set(_key(index), json.dumps(address))

    def find(self, index: int) -> Address | None:
        """Return the last published address of server ``index``, or ``None``."""
        key = _key(index)
        if not self._store.check([key]):
            return None
        try:
            host, port = json.loads(self._store.get(key))
        except ValueError:
            return None  # the store takes what anybody writes; who is there proves itself
        return Address(str(host), port) if type(port) is int and 0 < port < 1 << 16 else None

    def finish(self) -> None:
        """Announce that the run is over, so that servers are no longer searched for."""
        self._store.set(_OVER, "1")

    @property
    def over(self) -> bool:
        """Return True if the run is over."""
        return self._store.check([_OVER])

    def ask_to_stop(self, number: int) -> None:
        """Announce this process's stop signal; 0: none."""
        if number:
            self._store.set(_STOP, str(number))

    def asked_to_stop(self) -> int:
        """Return the stop signal of any process, or 0; looked up at most twice a second."""
        now = time.monotonic()
        if now - self._looked > _LOOK:
            self._looked = now
            self._stop = int(self._store.get(_STOP)) if self._store.check([_STOP]) else 0
        return self._stop


_OVER = "over"
_STOP = "stop"
_LOOK = 0.5  # seconds


def _key(index: int) -> str:
    return str(index)
