"""A port for processes of this run only, and calls to it.

One thread accepts connections and keeps those without a proof of identity: a bounded number, for a bounded time, each
with three messages of fixed size. Beyond the number the oldest is closed. Failed callers are closed and counted; a
stranger cannot affect the rest, and a lack of descriptors does not end the accepting.
"""

from __future__ import annotations

import resource
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import final

from phalanx.comm.frames import Connection, FrameForms
from phalanx.comm.handshake import ANSWER, HELLO, PROOF, CallerHandshake, HandshakeError, Identity, ListenerHandshake

DEADLINE = 5.0
"""Seconds in which a connection has to prove who it is."""

_STRANGERS = 64  # connections that may be about to prove it, where few are expected
_BACK_OFF = 0.1  # seconds without accepting, once there was no descriptor for a connection
_AT_ONCE = 32  # connections accepted before those that wait are looked at
_LOOK = 0.2  # seconds between looks at deadlines
_REASONS = 8  # kinds of refusals that are told apart


@dataclass(slots=True, eq=False)
class _Stranger:
    plug: socket.socket
    host: str
    until: float
    came: bytearray = field(default_factory=bytearray)
    handshake: ListenerHandshake | None = None


@final
class RunListener:
    """A listener at ``host`` as ``identity``, for ``callers`` that hold the run's ``secret``."""

    def __init__(self, host: str, secret: bytes, identity: Identity, callers: Collection[Identity]) -> None:
        self._secret, self._identity, self._callers = secret, identity, frozenset(callers)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._plug = socket.create_server((host, 0), family=family, backlog=128)
        self._plug.setblocking(False)
        self.port: int = self._plug.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._plug, selectors.EVENT_READ)
        self._strangers: dict[_Stranger, None] = {}  # in the order they came
        limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)[0], max(_STRANGERS, 2 * len(self._callers))
        self._most = most if limit == resource.RLIM_INFINITY else max(4, min(most, limit // 4))
        self._resume_at = 0.0
        self._closed = self._running = False
        self._refused: Counter[str] = Counter()

    def run(self, welcome: Callable[[Identity, socket.socket], None]) -> None:
        """Accept until ``close``; ``welcome`` takes over the socket of each caller with a valid proof."""
        self._running = True
        while not self._closed:
            for key, _ in self._selector.select(_LOOK):
                if key.data is None:
                    self._accept(welcome)
                elif key.data in self._strangers:  # not if it has just made way
                    self._listen(key.data, welcome)
            now = time.monotonic()
            for stranger in [one for one in self._strangers if one.until < now]:
                self._refuse(stranger, f"has not said who it is within {DEADLINE:g} s")
            if self._resume_at and now > self._resume_at:
                self._resume_at = 0.0
                self._selector.register(self._plug, selectors.EVENT_READ)
        self._let_go()

    def close(self) -> None:
        """End ``run`` from any thread, and release all resources."""
        self._closed = True
        with suppress(OSError):
            self._plug.shutdown(socket.SHUT_RDWR)
        if not self._running:
            self._let_go()

    def refusals(self) -> Counter[str]:
        """Count refused connections by reason; the number of reasons is bounded."""
        return Counter(self._refused)

    def note_ended(self, caller: Identity, reason: str) -> None:
        """Count among the refusals an accepted caller's connection that was ended for ``reason``."""
        self._note(f"from {caller} was ended: ", reason)

    def _let_go(self) -> None:
        for stranger in tuple(self._strangers):
            stranger.plug.close()
        self._selector.close()
        self._plug.close()

    def _accept(self, welcome: Callable[[Identity, socket.socket], None]) -> None:
        for _ in range(_AT_ONCE):
            try:
                plug, address = self._plug.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if not self._closed:
                    self._back_off(error)
                return
            plug.setblocking(False)
            stranger = _Stranger(plug, str(address[0]), time.monotonic() + DEADLINE)
            while len(self._strangers) >= self._most:
                self._refuse(next(iter(self._strangers)), "made way for others before it had said who it is")
            self._strangers[stranger] = None
            self._selector.register(plug, selectors.EVENT_READ, stranger)
            self._listen(stranger, welcome)

    def _back_off(self, error: OSError) -> None:
        """Wait briefly and drop the older half of the unidentified callers, which may hold all descriptors."""
        self._note("", f"could not be accepted: {error.strerror}")
        for stranger in list(self._strangers)[: (len(self._strangers) + 1) // 2]:
            self._refuse(stranger, "made way for others before it had said who it is")
        self._selector.unregister(self._plug)
        self._resume_at = time.monotonic() + _BACK_OFF

    def _listen(self, stranger: _Stranger, welcome: Callable[[Identity, socket.socket], None]) -> None:
        try:
            while True:
                wanted = PROOF if stranger.handshake else HELLO
                data = stranger.plug.recv(wanted - len(stranger.came))
                if not data:
                    raise HandshakeError("left before it had said who it is")
                stranger.came += data
                if len(stranger.came) < wanted:
                    continue
                said, stranger.came = bytes(stranger.came), bytearray()
                if stranger.handshake is None:
                    stranger.handshake = ListenerHandshake(self._secret, self._identity, said)
                    if stranger.handshake.caller not in self._callers:
                        raise HandshakeError("says that it is one whom this run does not have")
                    if stranger.plug.send(stranger.handshake.answer) != ANSWER:
                        raise HandshakeError("takes no answer")
                else:
                    identity = stranger.handshake.judge(said)
                    self._forget(stranger)
                    welcome(identity, stranger.plug)
                    return
        except BlockingIOError:
            return
        except HandshakeError as error:
            self._refuse(stranger, str(error))
        except OSError:
            self._refuse(stranger, "left before it had said who it is")

    def _forget(self, stranger: _Stranger) -> None:
        self._strangers.pop(stranger, None)
        with suppress(KeyError, ValueError):
            self._selector.unregister(stranger.plug)

    def _refuse(self, stranger: _Stranger, reason: str) -> None:
        self._forget(stranger)
        stranger.plug.close()
        self._note(f"from {stranger.host} ", reason)

    def _note(self, where: str, reason: str) -> None:
        text = f"a connection {where}{reason}"
        self._refused[text if text in self._refused or len(self._refused) < _REASONS else "other connections"] += 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """A process as it calls others of its run, with its identity and the run's ``secret``."""

    identity: Identity
    secret: bytes = field(repr=False)

    def call(
        self, wanted: Identity, host: str, port: int, forms: FrameForms, *, patience: float = 0.0, timeout: float = 5.0
    ) -> Connection:
        """Connect to ``wanted``, which must prove its identity; ``forms`` are those of frames from it.

        Raises:
            OSError: without an answer within ``timeout`` seconds; its subclass HandshakeError for any other process.
        """
        plug = socket.create_connection((host, port), timeout=timeout)
        try:
            handshake = CallerHandshake(self.secret, self.identity, wanted)
            plug.sendall(handshake.hello)
            answer = bytearray()
            until = time.monotonic() + timeout
            while len(answer) < ANSWER:
                data = plug.recv(ANSWER - len(answer))
                if not data or time.monotonic() > until:
                    raise HandshakeError(f"who listens there is not {wanted} of this run")
                answer += data
            plug.sendall(handshake.proof(bytes(answer)))
            return Connection(plug, forms, patience=patience)
        except BaseException:
            plug.close()
            raise
