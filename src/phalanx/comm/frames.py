"""Frames over TCP, sent from and received into the memory of tensors.

A frame is a head of 16 bytes (its kind, the lengths of the two parts that follow), a small JSON object, and the bytes
of tensors one after the other, with kinds and shapes known to both sides. There is no pickle and no copy: ``sendmsg``
reads tensors in place and ``recv_into`` writes them in place. Socket calls release the interpreter's lock, so that one
process serves many peers with a thread each.

Each kind of frame is declared: its fields with their allowed values, the longest JSON, and whether tensors follow
(``FrameForm``). Any other frame ends the connection, and only the connection.

A peer's death ends the connection at once. An unreachable peer may come back: the kernel sends again, and gives up
after ``GIVEN_UP`` seconds.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast, final

import torch

GIVEN_UP = 90
"""Seconds without any answer from a peer's machine after which its connection ends."""

_HEAD = struct.Struct("<HHIQ")  # magic, kind, bytes of JSON, bytes of tensors
_MAGIC = 0x5058
_AT_ONCE = 1 << 22  # bytes a system call moves
_VECTORS = min(1024, os.sysconf("SC_IOV_MAX") if hasattr(os, "sysconf") else 16)


class LostError(ConnectionError):
    """Loss of a peer: it is gone, or it sent a frame that is not allowed."""


class ProtocolError(LostError):
    """A frame that is not allowed, ``what``, from a live peer; from a process of the run, a bug in Phalanx."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the peer does not keep to this protocol: {what}")


@dataclass(frozen=True, slots=True)
class Frame:
    """The head of a message, followed by ``size`` bytes of tensors; call ``fill`` before the next frame.

    ``kind`` is a number known to both sides, and ``meta`` the JSON object.
    """

    kind: int
    meta: dict[str, Any]
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameForm:
    """The allowed content of frames of one kind.

    Attributes:
        fields: name → check of its value. Other fields are not allowed.
        optional: fields that may be absent.
        tensors: whether bytes of tensors may follow.
        most: bytes of JSON at most.
    """

    fields: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict[str, Callable[[Any], bool]])
    optional: frozenset[str] = frozenset()
    tensors: bool = False
    most: int = 4096

    def fault(self, meta: object) -> str:
        """Return the first deviation in the JSON of a frame, or ""."""
        if not isinstance(meta, dict):
            return "no object"
        given = cast("dict[str, Any]", meta)
        if beyond := given.keys() - self.fields.keys():
            return f"a field {min(beyond)[:40]!r}"
        for name, allows in self.fields.items():
            if name in given:
                if not allows(given[name]):
                    return f"{name} = {repr(given[name])[:40]}"
            elif name not in self.optional:
                return f"no {name}"
        return ""


FrameForms = Mapping[int, FrameForm]
"""Kind → form, of every kind that a peer may send."""


def views(tensors: Iterable[torch.Tensor]) -> list[memoryview]:
    """Return views of contiguous CPU tensors' memory; make them once for tensors that travel often.

    Raises:
        ValueError: if a tensor is on a device or has gaps.
    """
    found: list[memoryview] = []
    for tensor in tensors:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(f"not a run of host memory: a tensor of shape {list(tensor.shape)} on {tensor.device}")
        if tensor.numel():
            found.append(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
    return found


@final
class Connection:
    """One end of a connection. Any thread may send; one thread receives.

    ``heard`` is the ``time.monotonic()`` of the last received bytes; ``sent`` counts the bytes of tensors sent so far.
    """

    def __init__(self, plug: socket.socket, forms: FrameForms, *, patience: float = 0.0) -> None:
        """Take over ``plug``; ``forms`` are those of frames that the peer may send.

        ``patience`` limits the seconds a call may wait for the peer; 0 disables the limit.
        """
        plug.settimeout(None)
        plug.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", (GIVEN_UP - 30) // 10)):
            if hasattr(socket, name):
                plug.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            plug.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GIVEN_UP * 1000)
        self._plug, self._forms, self._sending = plug, forms, threading.Lock()
        self._head = bytearray(_HEAD.size)
        self.heard = time.monotonic()
        self.sent = 0
        if patience:
            self.wait_at_most(patience)

    @property
    def fileno(self) -> int:
        """Return the descriptor, to wait for several at once; -1 once it is closed."""
        return self._plug.fileno()

    def wait_at_most(self, seconds: float) -> None:
        """Make later calls that wait so long for the peer end in ``LostError``."""
        whole, part = divmod(seconds, 1.0)
        limit = struct.pack("@ll", int(whole), int(part * 1e6))
        self._plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._plug.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, kind: int, meta: dict[str, Any] | None = None, payload: Sequence[memoryview] = ()) -> None:
        """Send one frame; ``payload`` comes from ``views``.

        Raises:
            LostError: if the peer is gone, or accepts no bytes within this end's patience.
        """
        text = json.dumps(meta).encode() if meta else b""
        size = sum(view.nbytes for view in payload)
        head = memoryview(_HEAD.pack(_MAGIC, kind, len(text), size) + text)
        with self._sending:
            try:
                self._send_all([head, *payload])
            except OSError as error:
                self.close()
                raise LostError(_why(error)) from None
            self.sent += size

    def receive(self) -> Frame:
        """Wait for the next frame, up to the bytes of its tensors.

        Raises:
            LostError: if the peer is gone, or sends no bytes within this end's patience.
            ProtocolError: if it sends a frame that is not allowed.
        """
        self._fill(memoryview(self._head))
        magic, kind, length, size = _HEAD.unpack(self._head)
        form = self._forms.get(kind) if magic == _MAGIC else None
        if form is None or length > form.most or (size and not form.tensors):
            raise self._broken(f"a frame of kind {kind}, {length} + {size} bytes" if magic == _MAGIC else "no frame")
        text = bytearray(length)
        self._fill(memoryview(text))
        try:
            meta = json.loads(text) if length else {}
        except (ValueError, RecursionError):
            raise self._broken("a frame without JSON") from None
        if fault := form.fault(meta):
            raise self._broken(f"a frame of kind {kind} with {fault}")
        return Frame(kind, meta, size)

    def fill(self, frame: Frame, payload: Sequence[memoryview]) -> None:
        """Receive the tensors of ``frame``.

        Raises:
            LostError: if the peer is gone before all of it came.
            ProtocolError: if it sent other tensors than expected.
        """
        expected = sum(view.nbytes for view in payload)
        if frame.size != expected:
            self.close()
            raise ProtocolError(f"{frame.size} bytes came where {expected} were expected")
        for view in payload:
            self._fill(view)

    def _broken(self, what: str) -> ProtocolError:
        self.close()
        return ProtocolError(f"{what} came")

    def close(self) -> None:
        """End the connection, also for a waiting thread; safe to call twice."""
        with suppress(OSError):
            self._plug.shutdown(socket.SHUT_RDWR)
        self._plug.close()

    def _send_all(self, parts: list[memoryview]) -> None:
        at = 0
        while at < len(parts):
            sent = self._plug.sendmsg(parts[at : at + _VECTORS])
            while sent and sent >= parts[at].nbytes:
                sent -= parts[at].nbytes
                at += 1
            if sent:
                parts[at] = parts[at][sent:]

    def _fill(self, view: memoryview) -> None:
        at, size = 0, view.nbytes
        while at < size:
            try:
                came = self._plug.recv_into(view[at : at + _AT_ONCE], 0, socket.MSG_WAITALL)
            except OSError as error:
                self.close()
                raise LostError(_why(error)) from None
            if not came:
                self.close()
                raise LostError("it has ended")
            self.heard = time.monotonic()
            at += came


def _why(error: OSError) -> str:
    return "it has said nothing for too long" if isinstance(error, BlockingIOError) else str(error)
