"""Frames over TCP: what is sent arrives in the right memory, and a peer that dies is seen."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest
import torch

from phalanx.comm.frames import Connection, FrameForm, LostError, views

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


def test_more_tensors_than_one_call_takes(ends: tuple[Connection, Connection]) -> None:
    here, there = ends
    tensors = list(torch.randn(3000, 700).unbind())
    sender = threading.Thread(target=here.send, args=(1, {}, views(tensors)))
    sender.start()
    frame = there.receive()
    whole = torch.zeros(3000, 700)
    there.fill(frame, views([whole]))
    sender.join()
    assert torch.equal(whole, torch.stack(tensors))


def test_the_end_of_a_peer_is_seen(ends: tuple[Connection, Connection]) -> None:
    here, there = ends
    here.close()
    with pytest.raises(LostError, match="ended"):
        there.receive()


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


@pytest.mark.parametrize("said", NO_FRAMES.values(), ids=NO_FRAMES)
def test_what_is_no_frame_ends_the_connection(ends: tuple[Connection, Connection], said: bytes) -> None:
    here, there = ends
    here._plug.sendall(said)
    with pytest.raises(LostError, match="protocol"):
        there.receive()
    assert there.fileno == -1


def test_json_too_deep_to_read_ends_the_connection(ends: tuple[Connection, Connection]) -> None:
    here, there = ends
    there._forms = {1: FrameForm(most=1 << 20)}
    here._plug.sendall(frame(b"[" * 100_000))
    with pytest.raises(LostError, match="protocol"):
        there.receive()


def test_other_tensors_than_expected_are_refused(ends: tuple[Connection, Connection]) -> None:
    here, there = ends
    here.send(1, {}, views([torch.ones(3)]))
    with pytest.raises(LostError, match="12 bytes came where 8 were expected"):
        there.fill(there.receive(), views([torch.zeros(2)]))


def test_a_peer_that_says_nothing_is_given_up(ends: tuple[Connection, Connection]) -> None:
    here, _ = ends
    here.wait_at_most(0.05)
    with pytest.raises(LostError, match="too long"):
        here.receive()


def test_only_runs_of_host_memory_travel() -> None:
    with pytest.raises(ValueError, match="not a run"):
        views([torch.zeros(3, 4).t()])
