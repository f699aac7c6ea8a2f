"""What every server does: listens, takes gradients in, gives values out, obeys the coordinator."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, final

import torch

from phalanx.comm.frames import Connection, Frame, LostError, views
from phalanx.hardware import peak_memory
from phalanx.parallel.compression import Codec, read
from phalanx.parallel.parameter_server import FrameKind, Pushed
from phalanx.train.parameter_server.shard_store import ShardStore

if TYPE_CHECKING:
    from phalanx.train.parameter_server.requests import RequestHandler

COORDINATOR = -1
"""The rank by which the coordinator introduces itself."""


@final
class Server:
    """A server's connections, a thread each.

    Attributes:
        trouble: what went wrong in one of the threads.
        over: the coordinator has said that all is done.
    """

    def __init__(self, store: ShardStore, host: str, codec: Codec | None = None) -> None:
        self._store, self._codec = store, codec
        self._listener = socket.create_server((host, 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self.trouble: BaseException | None = None
        self.over = threading.Event()
        self._leading: set[Connection] = set()
        self._led = time.monotonic()
        self._requests: RequestHandler | None = None
        self._connections: set[Connection] = set()
        self._threads: list[threading.Thread] = []

    def start(self, requests: RequestHandler | None = None) -> None:
        """Begin to answer; server 0 with what it does for workers."""
        self._requests = requests
        self._run(self._accept)

    def close(self) -> None:
        """End every connection and thread."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in tuple(self._connections):
            connection.close()
        for thread in tuple(self._threads):
            thread.join(timeout=5.0)

    @property
    def alone_for(self) -> float:
        """Seconds since the coordinator was last connected; 0 while it is."""
        return 0.0 if self._leading else time.monotonic() - self._led

    def obey(self, kind: FrameKind, meta: dict[str, Any]) -> dict[str, Any]:
        """Do what the coordinator says; returns what there is to answer."""
        store, shard = self._store, self._store.shard
        match kind:
            case FrameKind.PREPARE:
                return {"square": shard.prepare(meta["step"], meta["parts"])}
            case FrameKind.APPLY:
                if "parts" in meta:
                    shard.prepare(meta["step"], meta["parts"])
                named = {name: meta[name] for name in ("scale", "rate", "oldest")}
                shard.apply(meta["step"], **named, watched=meta.get("watched", False))
            case FrameKind.SNAPSHOT:
                store.snapshot(meta["progress"])
            case FrameKind.RESTORE:
                store.go_back(meta["version"], meta["term"], meta["progress"])
            case FrameKind.HELLO:
                return self._introduction()
            case FrameKind.END:
                return {"memory": {"peak_bytes": peak_memory(), **shard.memory, "buffers": 0, "activations": 0}}
            case _:
                raise LostError(f"a {kind.name} from the coordinator")
        return {}

    def _introduction(self) -> dict[str, Any]:
        shard = self._store.shard
        return {
            "index": self._store.index,
            "term": shard.term,
            "version": shard.version,
            "snapshots": self._store.snapshots(),
            "held": self._store.held,
            "forms": [[list(shape), str(dtype)] for shape, dtype in shard.form.values()],
        }

    def _run(self, work: Callable[..., None], *arguments: Any) -> None:
        def guarded() -> None:
            try:
                work(*arguments)
            except BaseException as error:  # told by the main thread
                self.trouble = self.trouble or error

        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=guarded, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                plug, _ = self._listener.accept()
            except OSError:
                return
            self._run(self._attend, Connection(plug))

    def _attend(self, connection: Connection) -> None:
        self._connections.add(connection)
        try:
            hello = connection.receive()
            if hello.kind != FrameKind.HELLO:
                return
            rank = int(hello.meta["rank"])
            if rank == COORDINATOR:
                self._follow(connection)
            elif "probe" in hello.meta:
                connection.send(FrameKind.WELCOME, {"index": self._store.index})
            else:
                self._serve(rank, connection, int(hello.meta["length"]))
        except LostError:
            return
        finally:
            connection.close()
            self._connections.discard(connection)

    def _follow(self, connection: Connection) -> None:
        self._leading.add(connection)
        try:
            connection.send(FrameKind.WELCOME, self._introduction())
            while True:
                frame = connection.receive()
                kind = FrameKind(frame.kind)
                if kind == FrameKind.GATHER:
                    share = self._store.share(frame.meta["what"])
                    send_tensors(connection, kind, {"held": share.held, "groups": share.groups}, share.tensors)
                else:
                    connection.send(kind, self.obey(kind, frame.meta))
                if kind == FrameKind.END:
                    self.over.set()
                    return
        finally:
            self._led = time.monotonic()
            self._leading.discard(connection)

    def _serve(self, rank: int, connection: Connection, length: int) -> None:
        requests, reason = self._requests, "its connection has ended"
        connection.send(FrameKind.WELCOME, self._introduction())
        if requests:
            requests.connected(rank, connection, length)
        try:
            while True:
                frame = connection.receive()
                match FrameKind(frame.kind):
                    case FrameKind.PULL:
                        self._pull(connection, frame)
                    case FrameKind.PUSH:
                        self._push(connection, frame)
                    case FrameKind.BEAT:
                        connection.send(FrameKind.BEAT)
                    case FrameKind.ASK if requests:
                        requests.asked(rank, connection, frame)
                    case FrameKind.END if requests:
                        requests.parted(rank, frame.meta["memory"])
                        return
                    case kind:
                        raise LostError(f"a {kind.name} from a worker")
        except LostError as error:
            reason = str(error)
            raise
        finally:
            if requests:
                requests.lost(rank, connection, reason)

    def _pull(self, connection: Connection, frame: Frame) -> None:
        shard = self._store.shard
        with shard.values() as (version, flat):
            meta = {"version": version, "term": shard.term}
            if (frame.meta["version"], frame.meta["term"]) == (version, shard.term):
                connection.send(FrameKind.VALUES, meta)
                return
            statistics = [one.clone() for one in self._store.statistics.whole] if self._store.index == 0 else []
            connection.send(FrameKind.VALUES, meta, [*flat.wire, *views(statistics)])

    def _push(self, connection: Connection, frame: Frame) -> None:
        shard = self._store.shard
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
        connection.send(FrameKind.TAKEN, {"new": shard.push(Pushed(**frame.meta), flat)})


_NAMES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def send_tensors(
    connection: Connection, kind: FrameKind, meta: dict[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """One frame with ``tensors`` (on the host), what they are, and ``meta``."""
    dense = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    described = [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in dense.items()]
    connection.send(kind, {**meta, "tensors": described}, views(dense.values()))


def receive_tensors(connection: Connection, frame: Frame) -> dict[str, torch.Tensor]:
    """The tensors that came with ``frame``."""
    found = {name: torch.empty(shape, dtype=_NAMES[dtype]) for name, shape, dtype in frame.meta.get("tensors", [])}
    connection.fill(frame, views(found.values()))
    return found
