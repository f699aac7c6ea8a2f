"""The protocol between workers, servers and the coordinator (server 0): kinds of frames, and the fields of each.

A worker asks the coordinator for a piece of a global batch, pulls current parameters from every server, computes the
sum of the piece's gradients, pushes each server its part, and reports the piece with its next request. The coordinator
tells every server when a step is complete, and the factor of its gradient.

The tables at the end, one for each direction, list the fields of each kind and their allowed values.
``Connection.receive`` refuses all else, so that handlers need no checks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import IntEnum
from typing import Any, cast

from phalanx.comm.frames import FrameForm, FrameForms
from phalanx.comm.handshake import ticket


class FrameKind(IntEnum):
    """The purpose of each frame; the sender is in brackets."""

    HELLO = 1
    """[worker, coordinator] who is new."""
    WELCOME = 2
    """[server] the tensors it holds, to a new connection."""
    ASK = 3
    """[worker] what it has computed since it last asked, if anything, with what was not finite in it; and for more. To
    the coordinator."""
    DEAL = 4
    """[coordinator] the piece that the worker is to compute."""
    PULL = 5
    """[worker] bring me up to date."""
    VALUES = 6
    """[server] the parameters, and from the coordinator buffers; or nothing, where the worker has them."""
    PUSH = 7
    """[worker] the gradients of a piece that it was dealt. Taken in once or dropped."""
    TAKEN = 8
    """[server] whether they counted."""
    BEAT = 9
    """[worker] it lives, and has come on so often. [coordinator] so does that."""
    END = 10
    """[coordinator] all is done. [worker] what it held in memory. [server] that, and whom it refused."""
    PREPARE = 11
    """[coordinator] bring the gradient of a step together. [server] how large it is."""
    APPLY = 12
    """[coordinator] make the update of a step, or leave it out. [server] done."""
    GATHER = 13
    """[coordinator] send me what you hold, all of it or some. [server] that."""


def deal_ticket(secret: bytes, rank: int, what: str, step: int, part: int) -> str:
    """Return the coordinator's signature that worker ``rank`` was assigned this piece."""
    return ticket(secret, f"{rank} {what} {step} {part}")


Allows = Callable[[Any], bool]

_MOST = 1 << 53
_NAMES = 1 << 26  # bytes of JSON where every tensor may be named


def _whole(least: int = 0) -> Allows:
    return lambda value: type(value) is int and least <= value <= _MOST


def _number(value: Any) -> bool:
    """Return a number; NaN and infinities are allowed, because a loss may be one."""
    return type(value) is float or (type(value) is int and -_MOST <= value <= _MOST)


def _duration(value: Any) -> bool:
    return _number(value) and 0 <= value <= _MOST


def _truth(value: Any) -> bool:
    return type(value) is bool


def _word(*allowed: str) -> Allows:
    return lambda value: isinstance(value, str) and value in allowed


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _ticket(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _anything(_: Any) -> bool:
    return True


def _each(allows: Allows, count: int | None = None) -> Allows:
    def allowed(value: Any) -> bool:
        return isinstance(value, list) and count in (None, len(cast("list[Any]", value))) and all(map(allows, value))

    return allowed


def _row(*allow: Allows) -> Allows:
    def allowed(value: Any) -> bool:
        return _each(_anything, len(allow))(value) and all(one(at) for one, at in zip(allow, value, strict=True))

    return allowed


def _named(allows: Allows) -> Allows:
    return lambda value: isinstance(value, dict) and all(map(allows, cast("dict[str, Any]", value).values()))


def _record(form: FrameForm) -> Allows:
    return lambda value: not form.fault(value)


def _sums(value: Any) -> bool:
    return _named(_row(_number, _number))(value) and "loss" in value


_COUNT, _ANY_VERSION = _whole(), _whole(-1)
_PIECE: dict[str, Allows] = {"step": _COUNT, "part": _COUNT, "ticket": _ticket}
_WHAT = _word("train", "evaluate")
_DONE = FrameForm(
    fields={
        **_PIECE,
        "what": _WHAT,
        "version": _COUNT,
        "sums": _sums,
        "samples": _COUNT,
        "seconds": _duration,
    },
)
_MEMORY = FrameForm(
    fields=dict.fromkeys(("peak_bytes", "parameters", "gradients", "optimizer", "buffers", "activations"), _COUNT)
)
_HELD = _each(_row(_text, _COUNT, _COUNT, _truth))
_WELCOME = FrameForm(fields={"index": _COUNT, "held": _HELD}, most=_NAMES)
_NOTHING = FrameForm()

FROM_WORKER: FrameForms = {
    FrameKind.HELLO: FrameForm(fields={"length": _COUNT, "order": _text, "files": _text}),
    FrameKind.ASK: FrameForm(fields={"done": _record(_DONE)}, optional=frozenset({"done"}), tensors=True, most=1 << 16),
    FrameKind.PULL: FrameForm(fields={"version": _ANY_VERSION}),
    FrameKind.PUSH: FrameForm(fields={**_PIECE, "without": _each(_COUNT)}, tensors=True, most=1 << 20),
    FrameKind.BEAT: FrameForm(fields={"progress": _COUNT}),
    FrameKind.END: FrameForm(fields={"memory": _record(_MEMORY)}),
}
"""What servers take from workers."""

TO_WORKER: FrameForms = {
    FrameKind.WELCOME: _WELCOME,
    FrameKind.DEAL: FrameForm(fields={**_PIECE, "what": _WHAT, "version": _COUNT}),
    FrameKind.VALUES: FrameForm(fields={"version": _COUNT}, tensors=True),
    FrameKind.TAKEN: FrameForm(fields={"new": _truth}),
    FrameKind.BEAT: _NOTHING,
    FrameKind.END: _NOTHING,
}
"""What workers take from servers."""

FROM_COORDINATOR: FrameForms = {
    FrameKind.HELLO: _NOTHING,
    FrameKind.PREPARE: FrameForm(fields={"step": _COUNT, "parts": _each(_COUNT)}, most=1 << 20),
    FrameKind.APPLY: FrameForm(
        fields={
            "step": _COUNT,
            "scale": _number,
            "largest": _number,
            "rate": _number,
            "watched": _truth,
            "left_out": _truth,
        }
    ),
    FrameKind.GATHER: FrameForm(fields={"what": _word("parameters", "gradients", "used", "everything")}),
    FrameKind.END: _NOTHING,
}
"""What servers take from the coordinator."""

_TENSORS = _each(_row(_text, _each(_COUNT), _text))
TO_COORDINATOR: FrameForms = {
    FrameKind.WELCOME: _WELCOME,
    FrameKind.PREPARE: FrameForm(fields={"square": _number}),
    FrameKind.APPLY: _NOTHING,
    FrameKind.GATHER: FrameForm(
        fields={"held": _HELD, "states": _named(_named(_anything)), "tensors": _TENSORS}, tensors=True, most=_NAMES
    ),
    FrameKind.END: FrameForm(fields={"memory": _record(_MEMORY), "refused": _named(_COUNT)}),
}
"""What the coordinator takes from servers."""
