"""A worker's connections to its servers: made, kept up and used; and its heartbeats to the coordinator."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch

from phalanx.comm.frames import Connection, Frame, LostError, ProtocolError, views
from phalanx.comm.handshake import Identity, Role
from phalanx.comm.listener import Caller
from phalanx.parallel.compression import Codec, Feedback, message
from phalanx.parallel.parameter_server import FrameKind, RowSlice, cut_out
from phalanx.parallel.parameter_server.protocol import TO_WORKER
from phalanx.train.parameter_server.server_group import Address, Directory, Patience, gone

T = TypeVar("T")


@dataclass(slots=True)
class ServerLink:
    """One server: its ``slices``, the ``version`` last pulled, and the compression losses of pushed gradients."""

    index: int
    connection: Connection | None = None
    slices: tuple[RowSlice, ...] = ()
    version: int = -1
    feedback: Feedback | None = None

    def receive(self) -> Frame:
        """Return the next frame that is not a heartbeat."""
        assert self.connection is not None
        while (frame := self.connection.receive()).kind == FrameKind.BEAT:
            pass
        return frame

    def expect(self, *kinds: FrameKind) -> Frame:
        """Return the next frame, which must be of one of these kinds."""
        frame = self.receive()
        if frame.kind not in kinds:
            raise LostError(f"{FrameKind(frame.kind).name} came where {kinds[0].name} was expected")
        return frame


@final
class ServerLinks:
    """All servers, seen from a worker."""

    def __init__(
        self,
        caller: Caller,
        data: Mapping[str, Any],
        servers: int,
        directory: Directory,
        patience: Patience,
        codec: Codec | None,
    ) -> None:
        """Take ``caller``, this worker's identity; ``data`` are the facts of its ``BatchPieces``."""
        self._caller, self._data, self._directory, self._patience = caller, data, directory, patience
        self._links = [ServerLink(index) for index in range(servers)]
        self._codec = codec
        self._pool = ThreadPoolExecutor(servers) if servers > 1 else None
        self._gone = threading.Event()
        self._progress = 0
        self._beats = threading.Thread(target=self._beat, daemon=True)

    def start(self) -> None:
        """Begin to send heartbeats."""
        self._beats.start()

    def close(self) -> None:
        """End every connection."""
        self._gone.set()
        for link in self._links:
            if link.connection:
                link.connection.close()
        if self._pool:
            self._pool.shutdown()
        if self._beats.is_alive():
            self._beats.join()

    def connect(self) -> bool:
        """Connect to every server. Returns False if the run is over.

        Raises:
            RunError: if a server cannot be found in time.
        """
        until = time.monotonic() + self._patience.back
        for link in self._links:
            while link.connection is None:
                if self._directory.over:
                    return False
                address, why = self._directory.find(link.index), "it has not said where it is"
                if address is not None:
                    try:
                        self._introduce(link, address)
                        break
                    except OSError as error:
                        why = str(error)
                if time.monotonic() > until:
                    where = f" at {address.host}:{address.port}" if address else ""
                    raise gone(f"server {link.index}{where} could not be reached for {self._patience.back:g} s: {why}")
                time.sleep(0.05)
        return True

    @property
    def over(self) -> bool:
        """Return True once the run has ended."""
        return self._directory.over

    def ask(self, done: dict[str, Any] | None, brought: list[memoryview]) -> Frame:
        """Report a result to the coordinator, and wait for the next order.

        Raises:
            LostError: if its connection has ended.
        """

        def asked(link: ServerLink) -> Frame:
            assert link.connection is not None
            link.connection.send(FrameKind.ASK, {"done": done} if done else {}, brought)
            return link.expect(FrameKind.DEAL, FrameKind.END)

        order = self._guarded(self._links[0], asked)
        self.moved()
        return order

    def moved(self) -> None:
        """Count progress of the main thread, reported with the next heartbeat."""
        self._progress += 1

    def say_goodbye(self, memory: dict[str, Any]) -> None:
        """Report memory to the coordinator, and wait until it hangs up.

        Until then the coordinator may be answering heartbeats: if this end were closed, its answers would fail, and it
        would not read the report behind them.
        """
        self._gone.set()
        with suppress(OSError):
            if connection := self._links[0].connection:
                connection.send(FrameKind.END, {"memory": memory})
                connection.wait_at_most(self._patience.parting)
                while True:
                    connection.receive()

    def pull(self, into: Mapping[str, torch.Tensor], statistics: list[memoryview]) -> int:
        """Update ``into`` (name → whole parameter, on the host). Returns the oldest version.

        Raises:
            LostError: if a connection has ended.
        """

        def pulled(link: ServerLink) -> int:
            assert link.connection is not None
            link.connection.send(FrameKind.PULL, {"version": link.version})
            frame = link.expect(FrameKind.VALUES)
            if frame.size:
                targets = views(cut_out(into[part.name], part) for part in link.slices)
                link.connection.fill(frame, [*targets, *(statistics if link.index == 0 else [])])
            link.version = frame.meta["version"]
            return link.version

        return min(self._each(pulled))

    def push(
        self, gradients: Mapping[str, torch.Tensor | None], like: Mapping[str, torch.Tensor], meta: dict[str, Any]
    ) -> None:
        """Send every server its part of ``gradients`` (name → whole, on the host; ``None``: zeros like ``like``).

        Raises:
            LostError: if a connection has ended.
        """
        none = [name for name, gradient in gradients.items() if gradient is None]
        whole = {name: torch.zeros_like(like[name]) if one is None else one for name, one in gradients.items()}

        def pushed(link: ServerLink) -> None:
            assert link.connection is not None
            parts = [cut_out(whole[part.name], part) for part in link.slices]
            without = [place for place, part in enumerate(link.slices) if part.name in none]
            payload = views(parts) if self._codec is None else views([_encoded(self._codec, link, parts)])
            link.connection.send(FrameKind.PUSH, {**meta, "without": without}, payload)
            link.expect(FrameKind.TAKEN)

        self._each(pushed)

    def _each(self, call: Callable[[ServerLink], T]) -> list[T]:
        if self._pool is None:
            return [self._guarded(self._links[0], call)]
        waiting = [self._pool.submit(self._guarded, link, call) for link in self._links]
        errors = [one.exception() for one in waiting]
        for error in errors:
            if error is not None:
                raise error
        return [one.result() for one in waiting]

    def _guarded(self, link: ServerLink, call: Callable[[ServerLink], T]) -> T:
        try:
            return call(link)
        except ProtocolError:
            raise
        except LostError as error:
            raise LostError(f"the connection to server {link.index} was lost: {error}") from None

    def _introduce(self, link: ServerLink, address: Address) -> None:
        wanted = Identity(Role.SERVER, link.index)
        patience = self._patience.answer
        connection = self._caller.call(wanted, address.host, address.port, TO_WORKER, patience=patience)
        connection.send(FrameKind.HELLO, dict(self._data))
        frame = connection.receive()
        if frame.kind != FrameKind.WELCOME:
            connection.close()
            raise LostError(f"{FrameKind(frame.kind).name} came where WELCOME was expected")
        link.slices = tuple(
            RowSlice(name=one[0], start=one[1], stop=one[2], whole=one[3]) for one in frame.meta["held"]
        )
        link.connection = connection

    def _beat(self) -> None:
        while not self._gone.wait(self._patience.beat):
            with suppress(LostError):
                if connection := self._links[0].connection:
                    connection.send(FrameKind.BEAT, {"progress": self._progress})


def _encoded(codec: Codec, link: ServerLink, parts: list[torch.Tensor]) -> torch.Tensor:
    flat = torch.cat([part.reshape(-1) for part in parts])
    if not codec.facts.feeds_back:
        return message(codec, flat)
    link.feedback = link.feedback or Feedback(codec)
    return link.feedback.message(flat)
