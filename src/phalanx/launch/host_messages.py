"""Tables of the messages that the agent of a host may send; each is checked as it comes."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from phalanx.files import json_value

LONGEST = 64 * 2**20
"""Bytes of one message."""

_LEFT = re.compile(r"(progress|stopped|failure)-([0-9]{1,6})(?:\.json)?")


def checked(line: bytes, ranks: range) -> dict[str, Any] | None:
    """Return the message in ``line`` of the host that has these ``ranks``; ``None`` where it is no message.

    A message that no agent sends becomes ``refused``, with why.
    """
    try:
        told = json_value(line)
    except ValueError:  # a login script that prints
        told = {} if len(line) >= LONGEST else None
    if not isinstance(told, dict):
        return None
    with suppress(ValueError):
        if _fits(told, _MESSAGES) and _own(told, ranks):
            return told
    return {"refused": f"it says what no agent says: {line[:100].decode(errors='replace').strip()}"}


def _own(told: dict[str, Any], ranks: range) -> bool:
    """Return whether what is told of a rank is of one of ``ranks``, and whole."""
    if "file" not in told:
        return told.get("output", told.get("ended", ranks[0])) in ranks
    found = _LEFT.fullmatch(told["file"])
    kind, number = (found[1], int(found[2])) if found else ("", -1)
    if kind == "failure":
        failure: Any = json_value(base64.b64decode(told["data"]))
        return _fits(failure, _FAILURE) and failure["rank"] == number and number in ranks
    return number in (range(1, 65) if kind == "stopped" else ranks)


def _fits(value: Any, form: Any) -> bool:
    """Return whether ``value`` is of ``form``: a type, words, a list, a record, one of several forms, a test."""
    if isinstance(form, type):
        return type(value) is form
    if isinstance(form, frozenset):
        return isinstance(value, str) and value in form
    if isinstance(form, list):
        return isinstance(value, list) and all(_fits(one, form[0]) for one in value)
    if isinstance(form, dict):
        same = isinstance(value, dict) and value.keys() == form.keys()
        return same and all(_fits(value[name], one) for name, one in form.items())
    return any(_fits(value, one) for one in form) if isinstance(form, tuple) else form(value)


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _bytes(value: Any) -> bool:
    return isinstance(value, str) and base64.b64decode(value, validate=True) is not None


def _named(form: Any) -> Callable[[Any], bool]:
    """Return the form of what has any names, and values of ``form``."""
    return lambda value: isinstance(value, dict) and _fits([*value.values()], [form])


def _path(value: Any) -> bool:
    """Return whether ``value`` leads to what is below a folder."""
    return isinstance(value, str) and "\0" not in value and not {"", ".", ".."} & {*value.split("/")}


def _there(value: Any) -> bool:
    """Return whether ``value`` is a folder of the host, or empty."""
    return isinstance(value, str) and value.isprintable() and value[:1] in ("", "/")


def _sizes(value: Any) -> bool:
    return isinstance(value, dict) and _fits([*value], [_path]) and _fits([*value.values()], [_count])


def _changes(value: Any) -> bool:
    """Return whether ``value`` has the size and the time of files."""
    stamps = [*value.values()] if isinstance(value, dict) and _fits([*value], [_path]) else [[]]
    return _fits(stamps, [[_count]]) and all(len(stamp) == 2 for stamp in stamps)


_STATE = frozenset({"same", "other", "missing"})
_NONE = type(None)
_FAILURE = {
    **dict.fromkeys(("kind", "message", "traceback", "host"), str),
    **dict.fromkeys(("lost_peer", "expected", "everywhere"), bool),
    **dict.fromkeys(("rank", "signal", "exit_code"), int),
    "step": (int, _NONE),
    "time": float,
    "hang": _NONE,
    "problems": [dict.fromkeys(("where", "given", "allowed", "fix"), str)],
}
_RESULTS = {
    "look": {"sees": bool, "files": _named(_STATE), "scratch": _there},
    "compare": bool,
    "hold": _sizes,
    **dict.fromkeys(("code", "unpack"), _there),
    **dict.fromkeys(("follow", "drop"), _NONE),
}
_MESSAGES = (
    {"hello": str, "pid": int, "python": str},
    {"port": int},
    {"output": int, "stream": frozenset({"stdout", "stderr"}), "data": _bytes},
    {"file": str, "data": _bytes, "now": float},
    {"ended": int, "code": int},
    {"over": bool},
    {"refused": str},
    {"piece": str, "at": _count, "data": _bytes},
    {"piece": str, "at": _count, "error": str},
    {"changed": _changes, "gone": [_path]},
    *({"files": frozenset({call}), "result": form} for call, form in _RESULTS.items()),
)
