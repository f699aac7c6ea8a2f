"""What the agent of a host may tell its launcher: one table of messages, by which each is checked as it comes."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from phalanx.errors import Problem
from phalanx.files import json_value

LONGEST = 64 * 2**20
"""Bytes of one message."""

_LEFT = re.compile(r"(progress|stopped|failure)-([0-9]{1,6})(?:\.json)?")
_PROBLEM = {field.name for field in fields(Problem)}
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("rank", "signal", "exit_code"), (int,)),
    **dict.fromkeys(("kind", "message", "traceback", "host"), (str,)),
    **dict.fromkeys(("lost_peer", "expected", "everywhere"), (bool,)),
    "step": (int, type(None)),
    "time": (float,),
    "problems": (list,),
    "hang": (type(None),),
}


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
    try:
        if any(
            told.keys() == kind.keys() and all(is_so(told[key]) for key, is_so in kind.items()) for kind in _MESSAGES
        ) and _own(told, ranks):
            return told
    except ValueError:
        pass
    return {"refused": f"it says what no agent says: {line[:100].decode(errors='replace').strip()}"}


def _own(told: dict[str, Any], ranks: range) -> bool:
    """Return whether what is told of a rank is of one of ``ranks``, and whole."""
    if "file" not in told:
        return told.get("output", told.get("ended", ranks[0])) in ranks
    found = _LEFT.fullmatch(told["file"])
    if not found or found[1] == "stopped":
        return bool(found) and 0 < int(found[2]) <= 64
    failure = json_value(base64.b64decode(told["data"])) if found[1] == "failure" else {}
    return int(found[2]) in ranks and (found[1] == "progress" or _is_failure(failure, int(found[2])))


def _is_failure(value: Any, rank: int) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == _KINDS.keys()
        and all(type(value[name]) in kinds for name, kinds in _KINDS.items())
        and value["rank"] == rank
        and all(
            isinstance(one, dict) and one.keys() == _PROBLEM and all(map(_text, one.values()))
            for one in value["problems"]
        )
    )


def _text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _bytes(value: Any) -> bool:
    return isinstance(value, str) and base64.b64decode(value, validate=True) is not None


def _path(value: Any) -> bool:
    """Return whether ``value`` leads to what is below a folder."""
    return _text(value) and not {"", ".", ".."} & {*value.split("/")}


def _stamp(value: Any) -> bool:
    """Return whether ``value`` is a size and a time."""
    return isinstance(value, list) and [*map(type, value)] == [int, int] and _count(value[0])


def _folder(value: Any) -> bool:
    return value == "" or (_text(value) and value.startswith("/") and value.isprintable())


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: type(value) in {*map(type, values)} and value in values


def _named(name: Callable[[Any], bool], allows: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(name, value)) and all(map(allows, value.values()))


def _looks(value: Any) -> bool:
    """Return whether ``value`` is what ``HostFiles.look`` gives."""
    if not (isinstance(value, dict) and value.keys() == {"sees", "files", "scratch"}):
        return False
    seen = _named(_text, _one_of("same", "other", "missing"))(value["files"])
    return seen and type(value["sees"]) is bool and _folder(value["scratch"])


_RESULTS: dict[str, Callable[[Any], bool]] = {
    "look": _looks,
    "compare": _one_of(True, False),
    "code": _folder,
    "unpack": _folder,
    "follow": _one_of(None),
    "drop": _one_of(None),
    "hold": _named(_path, _count),
}
_MESSAGES: list[dict[str, Callable[[Any], bool]]] = [
    {"hello": _text, "pid": _count, "python": _text},
    {"port": lambda value: _count(value) and 0 < value < 65536},
    {"output": _count, "stream": _one_of("stdout", "stderr"), "data": _bytes},
    {"file": _text, "data": _bytes, "now": lambda value: type(value) is float},
    {"ended": _count, "code": lambda value: type(value) is int and abs(value) < 2**31},
    {"over": _one_of(True)},
    {"refused": _text},
    {"piece": _text, "at": _count, "data": _bytes},
    {"piece": _text, "at": _count, "error": _text},
    {
        "changed": _named(_path, _stamp),
        "gone": lambda value: isinstance(value, list) and all(map(_path, value)),
    },
    *({"files": _one_of(call), "result": allows} for call, allows in _RESULTS.items()),
]
