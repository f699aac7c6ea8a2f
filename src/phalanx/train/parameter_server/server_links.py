"""A worker's connections to its servers: found, kept up, asked; and the signs of life that go to the coordinator."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch

from phalanx.comm.frames import Connection, Frame, LostError, views
from phalanx.comm.handshake import Identity, Role
from phalanx.comm.listener import Caller
from phalanx.parallel.compression import Codec, Feedback, message
from phalanx.parallel.parameter_server import FrameKind, RowSlice, cut_out
from phalanx.parallel.parameter_server.protocol import TO_WORKER
from phalanx.train.parameter_server.server_group import Address, Directory, Patience, gone

T = TypeVar("T")


class LinkLostError(Exception):
    """The connection to server ``index`` has ended."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


@dataclass(slots=True)
class ServerLink:
    """One server: the ``slices`` it holds, the ``version`` last pulled, what was left out of gradients pushed to it."""

    index: int
    connection: Connection | None = None
    slices: tuple[RowSlice, ...] = ()
    version: int = -1
    term: int = -1
    feedback: Feedback | None = None

    def receive(self) -> Frame:
        """The next frame that is not a sign of life."""
        assert self.connection is not None
        while (frame := self.connection.receive()).kind == FrameKind.BEAT:
            pass
        return frame

    def expect(self, *kinds: FrameKind) -> Frame:
        """The next frame, which must be of one of these kinds."""
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
        """``caller`` is this worker, as it connects; ``data`` is what ``BatchPieces`` tells of those that it reads."""
        self._caller, self._data, self._directory, self._patience = caller, data, directory, patience
        self._links = [ServerLink(index) for index in range(servers)]
        self._codec = codec
        self._pool = ThreadPoolExecutor(servers) if servers > 1 else None
        self._gone = threading.Event()
        self._progress, self._moved_at, self._busy = 0, time.monotonic(), False
        self._beats = threading.Thread(target=self._beat, daemon=True)

    def start(self) -> None:
        """Begin to send signs of life."""
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
        """Connect to every server that there is no connection to. Returns whether the run still goes on.

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

    def lose(self, index: int) -> None:
        """Let go of the connection to a server."""
        link = self._links[index]
        connection, link.connection = link.connection, None
        if connection:
            connection.close()
        link.version = link.term = -1

    def ask(self, done: dict[str, Any] | None, brought: list[memoryview]) -> Frame:
        """Tell the coordinator what was computed, and wait for what to do.

        Raises:
            LinkLostError: if its connection has ended.
        """

        def asked(link: ServerLink) -> Frame:
            assert link.connection is not None
            link.connection.send(FrameKind.ASK, {"done": done} if done else {}, brought)
            return link.expect(FrameKind.DEAL, FrameKind.END)

        self._busy = False
        order = self._guarded(self._links[0], asked)
        self.moved()
        self._busy = True
        return order

    def moved(self) -> None:
        """The main thread has come on; the coordinator is told with the next sign of life."""
        self._progress += 1
        self._moved_at = time.monotonic()

    def say_goodbye(self, memory: dict[str, Any]) -> None:
        """Tell the coordinator what was held in memory, and wait until it has heard that and hangs up.

        Before that it may be about to answer signs of life: if this end were closed by then, to answer would fail, and
        what is behind them would not be read.
        """
        self._gone.set()
        with suppress(OSError):
            if connection := self._links[0].connection:
                connection.send(FrameKind.END, {"memory": memory})
                connection.wait_at_most(self._patience.parting)
                while True:
                    connection.receive()

    def pull(self, into: Mapping[str, torch.Tensor], statistics: list[memoryview]) -> tuple[int, int]:
        """Bring ``into`` (name → whole parameter, on the host) up to date. Returns the oldest version and the term.

        Raises:
            LinkLostError: if a connection has ended.
        """

        def pulled(link: ServerLink) -> tuple[int, int]:
            assert link.connection is not None
            link.connection.send(FrameKind.PULL, {"version": link.version, "term": link.term})
            frame = link.expect(FrameKind.VALUES)
            if frame.size:
                targets = views(cut_out(into[part.name], part) for part in link.slices)
                link.version = link.term = -1  # until all of it is here
                link.connection.fill(frame, [*targets, *(statistics if link.index == 0 else [])])
            link.version, link.term = frame.meta["version"], frame.meta["term"]
            return link.version, link.term

        found = self._each(pulled)
        return min(version for version, _ in found), max(term for _, term in found)

    def push(
        self, gradients: Mapping[str, torch.Tensor | None], like: Mapping[str, torch.Tensor], meta: dict[str, Any]
    ) -> None:
        """Give every server its part of ``gradients`` (name → whole, on the host; ``None`` is zeros as of ``like``).

        Raises:
            LinkLostError: if a connection has ended.
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
        if link.connection is None:
            raise LinkLostError(link.index)
        try:
            return call(link)
        except LostError:
            raise LinkLostError(link.index) from None

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
        link.version = link.term = -1
        link.connection = connection

    def _beat(self) -> None:
        while not self._gone.wait(self._patience.beat):
            with suppress(LostError):
                if connection := self._links[0].connection:
                    connection.send(FrameKind.BEAT, {"progress": self._progress})
            still = time.monotonic() - self._moved_at
            if self._busy and still > self._patience.stuck + 4 * self._patience.beat:
                self._end_process(still)

    def _end_process(self, still: float) -> None:
        """Let another process take this one's place: the main thread can be neither woken nor told."""
        who = self._caller.identity
        print(f"{who} has made no progress for {still:.0f} s and ends; this is where it stands:", file=sys.stderr)
        faulthandler.dump_traceback(all_threads=True)
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def _encoded(codec: Codec, link: ServerLink, parts: list[torch.Tensor]) -> torch.Tensor:
    """One message of all ``parts``, with what was left out of those before."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    if not codec.facts.feeds_back:
        return message(codec, flat)
    link.feedback = link.feedback or Feedback(codec)
    return link.feedback.message(flat)
