"""The work of every server: it listens, receives gradients, sends values, and obeys the coordinator.

It answers callers with a proven identity (``comm/listener.py``), one connection of each. A frame that is not allowed
ends its connection; from the coordinator it ends the run, because it would be sent again.
"""

from __future__ import annotations

import math
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import fields
from hmac import compare_digest
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from phalanx.comm import Place
from phalanx.comm.frames import Connection, Frame, LostError, ProtocolError, views
from phalanx.comm.handshake import Identity, Role
from phalanx.comm.listener import RunListener
from phalanx.errors import RunError
from phalanx.hardware import peak_memory
from phalanx.parallel.compression import Codec, read
from phalanx.parallel.parameter_server import FrameKind, Pushed, Update, deal_ticket
from phalanx.parallel.parameter_server.protocol import FROM_COORDINATOR, FROM_WORKER
from phalanx.train.parameter_server.shard_store import ShardStore

if TYPE_CHECKING:
    from phalanx.train.parameter_server.requests import RequestHandler

COORDINATOR = Identity(Role.COORDINATOR, 0)


@final
class Server:
    """A server's connections, a thread each.

    Attributes:
        trouble: the error of one of the threads.
        over: whether the coordinator has said that all is done.
    """

    def __init__(self, store: ShardStore, place: Place, workers: int, codec: Codec | None = None) -> None:
        """Listen at ``place``, this process's; ranks below ``workers`` are the workers."""
        self._store, self._codec, self._secret = store, codec, place.secret
        mine = Identity(Role.SERVER, store.index)
        callers = [COORDINATOR, *(Identity(Role.WORKER, rank) for rank in range(workers))]
        self.listener = RunListener(place.host, place.secret, mine, callers)
        self.port = self.listener.port
        self.trouble: BaseException | None = None
        self.over = threading.Event()
        self._led, self._begun = False, time.monotonic()
        self._requests: RequestHandler | None = None
        self._connections: dict[Identity, Connection] = {}
        self._changing = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self, requests: RequestHandler | None = None) -> None:
        """Begin to answer; server 0 with its handler of workers' requests."""
        self._requests = requests
        self._run(self.listener.run, self._welcome)

    def close(self) -> None:
        """End every connection and thread."""
        self.listener.close()
        with self._changing:
            for connection in self._connections.values():
                connection.close()
        for thread in tuple(self._threads):
            thread.join(timeout=5.0)

    @property
    def alone_for(self) -> float:
        """Return the seconds without a coordinator; 0 once it has connected."""
        return 0.0 if self._led else time.monotonic() - self._begun

    def obey(self, kind: FrameKind, meta: dict[str, Any]) -> dict[str, Any]:
        """Carry out the coordinator's order, and return the answer."""
        shard = self._store.shard
        match kind:
            case FrameKind.PREPARE:
                return {"square": shard.prepare(meta["step"], meta["parts"])}
            case FrameKind.APPLY:
                shard.apply(Update(**{one.name: meta[one.name] for one in fields(Update)}))
            case FrameKind.END:
                memory = {"peak_bytes": peak_memory(), **shard.memory, "buffers": 0, "activations": 0}
                return {"memory": memory, "refused": dict(self.listener.refusals())}
            case _:
                raise ProtocolError(f"a {kind.name} from the coordinator")
        return {}

    def _introduction(self) -> dict[str, Any]:
        return {"index": self._store.index, "held": self._store.held}

    def _run(self, work: Callable[..., None], *arguments: Any) -> None:
        def guarded() -> None:
            try:
                work(*arguments)
            except BaseException as error:  # told by the main thread
                self.trouble = self.trouble or error

        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _welcome(self, caller: Identity, plug: socket.socket) -> None:
        """Serve a caller in its own thread; refuse a second connection of the same worker."""
        connection = Connection(plug, FROM_WORKER if caller.role == Role.WORKER else FROM_COORDINATOR)
        with self._changing:
            known = self._connections.setdefault(caller, connection)
        if known is not connection:
            connection.close()
            self.listener.note_ended(caller, "it has a connection already")
            return
        self._run(self._attend, caller, connection)

    def _attend(self, caller: Identity, connection: Connection) -> None:
        try:
            if self.trouble:
                return  # this process is about to end
            hello = connection.receive()
            if hello.kind != FrameKind.HELLO:
                return
            if caller.role == Role.COORDINATOR:
                self._follow(connection)
            else:
                self._serve(caller.rank, connection, hello.meta)
        except ProtocolError as error:
            if caller.role == Role.COORDINATOR:
                what = f"server {self._store.index} cannot follow its coordinator, which is a fault of Phalanx's"
                raise RunError(f"{what}: {error}") from error
            self.listener.note_ended(caller, str(error))
        except LostError as error:
            if caller.role == Role.COORDINATOR:  # a worker's loss is noted by ``requests``
                raise LostError(f"the connection to server 0 was lost: {error}") from None
        finally:
            connection.close()
            with self._changing:
                del self._connections[caller]

    def _follow(self, connection: Connection) -> None:
        self._led = True
        connection.send(FrameKind.WELCOME, self._introduction())
        while not self.over.is_set():
            frame = connection.receive()
            kind = FrameKind(frame.kind)
            if kind == FrameKind.GATHER:
                share = self._store.share(frame.meta["what"])
                send_tensors(connection, kind, {"held": share.held, "states": share.states}, share.tensors)
            else:
                connection.send(kind, self.obey(kind, frame.meta))
            if kind == FrameKind.END:
                self.over.set()

    def _serve(self, rank: int, connection: Connection, data: Mapping[str, Any]) -> None:
        requests, reason = self._requests, "its connection has ended"
        connection.send(FrameKind.WELCOME, self._introduction())
        if requests:
            requests.connected(rank, connection, data)
        try:
            while self._handle(rank, connection, connection.receive()):
                pass
        except LostError as error:
            reason = str(error)
            raise
        finally:
            if requests:
                requests.lost(rank, connection, reason)

    def _handle(self, rank: int, connection: Connection, frame: Frame) -> bool:
        """Handle a worker's frame, and return True if more frames follow.

        Raises:
            ProtocolError: if the frame is not allowed, or if handling it fails.
        """
        requests, kind = self._requests, FrameKind(frame.kind)
        try:
            match kind:
                case FrameKind.PULL:
                    self._pull(connection, frame)
                case FrameKind.PUSH:
                    self._push(rank, connection, frame)
                case FrameKind.BEAT if requests:
                    requests.heard(rank, connection, frame.meta["progress"])
                    connection.send(FrameKind.BEAT)
                case FrameKind.ASK if requests:
                    if done := frame.meta.get("done"):
                        self._check_deal(rank, done["what"], done)
                    requests.asked(rank, connection, frame)
                case FrameKind.END if requests:
                    requests.parted(rank, frame.meta["memory"])
                case _:
                    raise ProtocolError(f"a {kind.name} from a worker")
        except (ValueError, TypeError, OverflowError, LookupError) as error:
            *_, last = traceback.extract_tb(error.__traceback__)
            where = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
            raise ProtocolError(f"{kind.name} could not be taken in ({where}: {error})") from error
        if requests and kind == FrameKind.ASK:  # what goes wrong in dealing is no fault of the frame
            requests.answer(rank)
        return kind != FrameKind.END

    def _pull(self, connection: Connection, frame: Frame) -> None:
        with self._store.shard.values() as (version, flat):
            meta = {"version": version}
            if frame.meta["version"] == version:
                connection.send(FrameKind.VALUES, meta)
                return
            statistics = [one.clone() for one in self._store.statistics.whole] if self._store.index == 0 else []
            connection.send(FrameKind.VALUES, meta, [*flat.wire, *views(statistics)])

    def _push(self, rank: int, connection: Connection, frame: Frame) -> None:
        shard, meta = self._store.shard, dict(frame.meta)
        self._check_deal(rank, "train", meta)
        del meta["ticket"]
        if max(meta["without"], default=0) >= len(shard.form):
            raise ProtocolError("a gradient came without what is not held here")
        flat = shard.blank()
        try:
            if self._codec is None:
                connection.fill(frame, flat.wire)
            else:
                (target,) = flat.whole
                sent = torch.empty(self._codec.bytes_of(target.numel()), dtype=torch.uint8)
                connection.fill(frame, views([sent]))
                read(self._codec, sent, target)
        except BaseException:
            shard.give_back(flat)
            raise
        connection.send(FrameKind.TAKEN, {"new": shard.push(Pushed(**meta), flat)})

    def _check_deal(self, rank: int, what: str, piece: dict[str, Any]) -> None:
        """Raise ProtocolError if the coordinator did not assign this piece to this worker."""
        expected = deal_ticket(self._secret, rank, what, piece["step"], piece["part"])
        if not compare_digest(expected, piece["ticket"]):
            raise ProtocolError(f"it brought part {piece['part']} of step {piece['step']}, which it was not assigned")


_NAMES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def send_tensors(
    connection: Connection, kind: FrameKind, meta: dict[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Send one frame with ``tensors`` (on the host), their description, and ``meta``."""
    dense = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    described = [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in dense.items()]
    connection.send(kind, {**meta, "tensors": described}, views(dense.values()))


def receive_tensors(connection: Connection, frame: Frame) -> dict[str, torch.Tensor]:
    """Receive the tensors that come with ``frame``.

    Raises:
        ProtocolError: if they do not match its announcement.
    """
    described = [(name, shape, _NAMES.get(dtype)) for name, shape, dtype in frame.meta.get("tensors", [])]
    size = sum(dtype.itemsize * math.prod(shape) if dtype else 1 << 62 for _, shape, dtype in described)
    if size != frame.size:
        connection.close()
        raise ProtocolError(f"{frame.size} bytes came where {size} were announced")
    found = {name: torch.empty(shape, dtype=dtype) for name, shape, dtype in described}
    connection.fill(frame, views(found.values()))
    return found
