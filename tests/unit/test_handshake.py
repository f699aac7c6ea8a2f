"""Who gets past a server's port: processes of the run, in their own roles, and nobody else, whatever others do."""

from __future__ import annotations

import errno
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from phalanx.comm import listener
from phalanx.comm.frames import Connection, FrameForm, LostError, views
from phalanx.comm.handshake import (
    ANSWER,
    HELLO,
    PROOF,
    CallerHandshake,
    HandshakeError,
    Identity,
    ListenerHandshake,
    Role,
    new_secret,
)
from phalanx.comm.listener import Caller, RunListener

SECRET = new_secret()
SERVER, WORKER, COORDINATOR = Identity(Role.SERVER, 0), Identity(Role.WORKER, 1), Identity(Role.COORDINATOR, 0)


class Door:
    """A listener with its thread; ``came`` are those that got in."""

    def __init__(self) -> None:
        self.listener = RunListener("127.0.0.1", SECRET, SERVER, [WORKER, COORDINATOR])
        self.came: list[Identity] = []
        self._plugs: list[socket.socket] = []
        self._thread = threading.Thread(target=self.listener.run, args=(self._welcome,))
        self._thread.start()

    def _welcome(self, caller: Identity, plug: socket.socket) -> None:
        self.came.append(caller)
        self._plugs.append(plug)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.listener.port), timeout=5.0)

    def call(self, identity: Identity = WORKER, wanted: Identity = SERVER, secret: bytes = SECRET) -> None:
        before = len(self.came)
        Caller(identity=identity, secret=secret).call(wanted, "127.0.0.1", self.listener.port, {}).close()
        until = time.monotonic() + 5
        while len(self.came) == before and time.monotonic() < until:
            time.sleep(0.002)

    def close(self) -> None:
        self.listener.close()
        self._thread.join(5.0)
        assert not self._thread.is_alive()
        for plug in self._plugs:
            plug.close()


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door()
    yield door
    door.close()


def ended(plug: socket.socket) -> bool:
    """Whether the other end closes the connection, whatever it says before."""
    with suppress(ConnectionError):
        while plug.recv(4096):
            pass
    return True


def test_processes_of_the_run_get_in_as_what_they_are(door: Door) -> None:
    door.call(WORKER)
    door.call(COORDINATOR)
    assert door.came == [WORKER, COORDINATOR]


@pytest.mark.parametrize("secret", [b"", b"\0" * 32, new_secret()], ids=["none", "zeros", "another"])
def test_without_the_secret_neither_end_is_believed(door: Door, secret: bytes) -> None:
    with pytest.raises(HandshakeError, match="not server 0 of this run"):
        door.call(secret=secret)
    caller = CallerHandshake(secret, WORKER, SERVER)
    with door.connect() as plug:
        plug.sendall(caller.hello)
        assert len(plug.recv(ANSWER)) == ANSWER
        plug.sendall(b"\1" * PROOF)
        assert ended(plug)
    assert door.came == []


def test_a_worker_is_no_coordinator_and_no_other_worker() -> None:
    """The key of one role proves no other."""
    hello = CallerHandshake(SECRET, COORDINATOR, SERVER)
    there = ListenerHandshake(SECRET, SERVER, hello.hello)
    for other in (WORKER, Identity(Role.SERVER, 0), Identity(Role.COORDINATOR, 1)):
        mine = CallerHandshake(SECRET, other, SERVER)
        mine.hello = hello.hello
        with pytest.raises(HandshakeError, match="coordinator, and cannot prove it"):
            there.judge(mine.proof(there.answer))
    assert there.judge(hello.proof(there.answer)) == COORDINATOR


def test_a_recorded_handshake_opens_nothing(door: Door) -> None:
    caller = CallerHandshake(SECRET, WORKER, SERVER)
    with door.connect() as plug:
        plug.sendall(caller.hello)
        answer = plug.recv(ANSWER, socket.MSG_WAITALL)
        recorded = caller.proof(answer)
        plug.sendall(recorded)
        with door.connect() as again:
            again.sendall(caller.hello)
            assert again.recv(ANSWER, socket.MSG_WAITALL) != answer
            again.sendall(recorded)
            assert ended(again)
        with door.connect() as mirror:  # the listener's own proof, given back
            mirror.sendall(caller.hello)
            mirror.sendall(mirror.recv(ANSWER, socket.MSG_WAITALL)[32:])
            assert ended(mirror)
    assert door.came == [WORKER]


def test_whoever_is_called_must_be_the_one_that_is_wanted(door: Door) -> None:
    with pytest.raises(HandshakeError, match="not server 1 of this run"):
        door.call(wanted=Identity(Role.SERVER, 1))
    with pytest.raises(HandshakeError):
        door.call(Identity(Role.WORKER, 7))
    assert door.came == []


@pytest.mark.parametrize("wanted", [Identity(Role.SERVER, 1), Identity(Role.WORKER, 0)], ids=str)
def test_a_listener_answers_only_those_that_want_it(wanted: Identity) -> None:
    with pytest.raises(HandshakeError, match="looks for somebody else"):
        ListenerHandshake(SECRET, SERVER, CallerHandshake(SECRET, WORKER, wanted).hello)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n".ljust(HELLO), b"\0" * HELLO, b"\xff" * 100_000])
def test_noise_is_refused_and_counted(door: Door, said: bytes) -> None:
    with door.connect() as plug:
        with suppress(ConnectionError):
            plug.sendall(said)
        assert ended(plug)
    door.call()
    assert door.came == [WORKER]
    assert sum(door.listener.refusals().values()) == 1


def test_who_says_nothing_or_too_little_is_not_waited_for(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "DEADLINE", 0.05)
    silent, slow = door.connect(), door.connect()
    slow.sendall(b"P")
    assert ended(silent)
    assert ended(slow)
    silent.close()
    slow.close()


def test_idle_connections_keep_nobody_out_and_are_few(door: Door) -> None:
    idle = [door.connect() for _ in range(200)]
    door.call()
    assert door.came == [WORKER]
    assert len(door.listener._strangers) <= 64
    assert len(door.listener.refusals()) < 10
    for one in idle:
        one.close()


def test_no_descriptor_for_a_connection_is_no_end(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``ulimit -n`` has it: accept fails, and works again once others have gone."""
    real, failing = door.listener._plug, [3]

    class Full:
        def accept(self) -> tuple[socket.socket, object]:
            if failing[0]:
                failing[0] -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return real.accept()

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

    monkeypatch.setattr(door.listener, "_plug", Full())
    door.call()
    assert failing == [0]
    assert door.came == [WORKER]


STEP = FrameForm(fields={"step": lambda value: type(value) is int}, optional=frozenset({"step"}), tensors=True, most=64)
FORMS = {1: STEP, 3: STEP, 5: FrameForm()}


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = Connection(socket.create_connection(listener.getsockname()[:2]), FORMS)
        there = Connection(listener.accept()[0], FORMS)
    yield here, there
    here.close()
    there.close()


def test_tensors_arrive_where_they_belong(ends: tuple[Connection, Connection]) -> None:
    here, there = ends
    tensors = [torch.arange(6.0).view(2, 3), torch.tensor(7, dtype=torch.int64), torch.ones(5, dtype=torch.bfloat16)]
    here.send(3, {"step": 4}, views(tensors))
    here.send(5)
    frame = there.receive()
    assert (frame.kind, frame.meta, frame.size) == (3, {"step": 4}, 24 + 8 + 10)
    found = [torch.zeros_like(one) for one in tensors]
    there.fill(frame, views(found))
    assert all(torch.equal(one, other) for one, other in zip(tensors, found, strict=True))
    assert there.receive().kind == 5


def test_the_end_in_the_middle_of_tensors_is_seen(ends: tuple[Connection, Connection]) -> None:
    here, there = ends
    here._plug.sendall(struct.pack("<HHIQ", 0x5058, 1, 0, 400) + b"\1" * 100)
    here.close()
    frame = there.receive()
    with pytest.raises(LostError, match="ended"):
        there.fill(frame, views([torch.zeros(100)]))


def head(kind: int, length: int, size: int = 0) -> bytes:
    return struct.pack("<HHIQ", 0x5058, kind, length, size)


def frame(text: bytes, kind: int = 1, size: int = 0) -> bytes:
    return head(kind, len(text), size) + text


NO_FRAMES = {
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "longer than its kind may be": head(1, 65),
    "very long": head(1, (1 << 32) - 1),
    "of an unknown kind": head(99, 0),
    "tensors where there are none": head(5, 0, 8),
    "no JSON": frame(b"{"),
    "no text": frame(b"\xff\xfe"),
    "no object": frame(b"[1]"),
    "deep": frame(b"[" * 64),
    "a field of another type": frame(b'{"step": "1"}'),
    "a truth for a number": frame(b'{"step": true}'),
    "a field too many": frame(b'{"step": 1, "rank": 1}'),
}
DEEP = frame(b"[" * 100_000)


@pytest.mark.parametrize("said", [*NO_FRAMES.values(), DEEP], ids=[*NO_FRAMES, "too deep to read"])
def test_what_is_no_frame_ends_the_connection(ends: tuple[Connection, Connection], said: bytes) -> None:
    here, there = ends
    if said is DEEP:
        there._forms = {1: FrameForm(most=1 << 20)}
    here._plug.sendall(said)
    with pytest.raises(LostError, match="protocol"):
        there.receive()
    assert there.fileno == -1
