"""Small values between ranks, as JSON in tensors. There is no pickle: data of a peer is parsed, never executed.

JSON turns tuples into lists, and keeps every bit of floats, NaN and infinities.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from phalanx.device_kinds import host, kind_of

_LENGTH = struct.Struct("<q")
_FIRST = 1024  # bytes of the first message, the length included: most values need no second one


def as_json(value: Any) -> Any:
    """Return ``value`` in the form that other ranks receive.

    Raises:
        TypeError: if a part of it is not JSON; names its place.
    """
    return json.loads(_encoded(value))


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the value of each rank of ``group`` (default: the default group), in rank order. Collective.

    Raises:
        TypeError: if a part of it is not JSON; names its place.
    """
    data, size = _encoded(value), dist.get_world_size(group)
    device = _device(group)
    first = _room(_FIRST, _LENGTH.pack(len(data)) + data[: _FIRST - _LENGTH.size]).to(device)
    firsts = [torch.empty_like(first) for _ in range(size)]
    dist.all_gather(firsts, first, group=group)
    heads = [bytes(one.cpu().numpy()) for one in firsts]
    lengths = [int(_LENGTH.unpack_from(head)[0]) for head in heads]
    texts = [head[_LENGTH.size :] for head in heads]
    beyond = max(lengths) - (_FIRST - _LENGTH.size)
    if beyond > 0:
        rest = _room(beyond, data[_FIRST - _LENGTH.size :]).to(device)
        rests = [torch.empty_like(rest) for _ in range(size)]
        dist.all_gather(rests, rest, group=group)
        texts = [text + bytes(one.cpu().numpy()) for text, one in zip(texts, rests, strict=True)]
    return [json.loads(text[:length]) for text, length in zip(texts, lengths, strict=True)]


def gather_json_to_first(value: Any) -> list[Any]:
    """Return each rank's value, in rank order, on rank 0; an empty list on other ranks. Collective.

    Raises:
        TypeError: if a part of it is not JSON; names its place.
    """
    data, device = _encoded(value), _device(None)
    longest = torch.tensor([len(data)], dtype=torch.int64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    mine = _room(_LENGTH.size + int(longest), _LENGTH.pack(len(data)) + data).to(device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(mine, every, dst=0)
    texts = (bytes(one.cpu().numpy()) for one in every or ())
    return [json.loads(text[_LENGTH.size : _LENGTH.size + _LENGTH.unpack_from(text)[0]]) for text in texts]


def scatter_json(values: Sequence[Any]) -> Any:
    """Return this rank's item of ``values``, a list on rank 0 with an item for each rank. Collective.

    Raises:
        TypeError: on rank 0, if a part of them is not JSON; names its place.
    """
    texts = [_encoded(value) for value in values] if dist.get_rank() == 0 else []
    device = _device(None)
    longest = torch.tensor([max(map(len, texts), default=0)], dtype=torch.int64, device=device)
    dist.broadcast(longest, src=0)
    size = _LENGTH.size + int(longest)
    given = [_room(size, _LENGTH.pack(len(text)) + text).to(device) for text in texts]
    mine = torch.empty(size, dtype=torch.uint8, device=device)
    dist.scatter(mine, given or None, src=0)
    text = bytes(mine.cpu().numpy())
    return json.loads(text[_LENGTH.size : _LENGTH.size + _LENGTH.unpack_from(text)[0]])


def send_json_to_first(value: Any) -> None:
    """Send ``value`` to rank 0 of the default group, which calls ``receive_json``.

    Raises:
        TypeError: if a part of it is not JSON; names its place.
    """
    data, device = _encoded(value), _device(None)
    dist.send(torch.tensor([len(data)], dtype=torch.int64, device=device), dst=0)
    dist.send(_room(len(data), data).to(device), dst=0)


def receive_json(rank: int) -> Any:
    """Receive a value from ``rank`` of the default group."""
    device = _device(None)
    length = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(length, src=rank)
    data = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.recv(data, src=rank)
    return json.loads(bytes(data.cpu().numpy()))


def alike_everywhere(value: Any) -> bool:
    """Return True if every rank of the default group gives the same value. Collective; sends two numbers.

    Raises:
        TypeError: if a part of it is not JSON; names its place.
    """
    number = int.from_bytes(hashlib.sha256(_encoded(value)).digest()[:7], "little")
    most = torch.tensor([number, -number], dtype=torch.int64, device=_device(None))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most[0]) == -int(most[1])


def true_anywhere(here: bool) -> bool:
    """Return True if ``here`` is true on any rank of the default group. Collective; sends one number."""
    found = torch.tensor([int(here)], dtype=torch.int64, device=_device(None))
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found)


def broadcast_json(value: Any) -> Any:
    """Return rank 0's ``value`` on every rank; other ranks' values are ignored. Collective.

    Raises:
        TypeError: on rank 0, if a part of it is not JSON; names its place.
    """
    device, here = _device(None), dist.get_rank() == 0
    data = _encoded(value) if here else b""
    first = _room(_FIRST, _LENGTH.pack(len(data)) + data[: _FIRST - _LENGTH.size]).to(device)
    dist.broadcast(first, src=0)
    head = bytes(first.cpu().numpy())
    (length,) = _LENGTH.unpack_from(head)
    text = head[_LENGTH.size :]
    if (beyond := length - len(text)) > 0:
        rest = _room(beyond, data[len(text) :]).to(device)
        dist.broadcast(rest, src=0)
        text += bytes(rest.cpu().numpy())
    return json.loads(text[:length])


def _room(size: int, data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    kinds = {kind_of(device) for device in (group or dist.distributed_c10d._get_default_group())._device_types}
    return (kinds.pop() if len(kinds) == 1 else host()).current()


def _encoded(value: Any) -> bytes:
    if trouble := _no_json(value, "value"):
        raise TypeError(f"ranks exchange JSON (None, bool, int, float, str, list, dict with names), and {trouble}")
    return json.dumps(value, separators=(",", ":")).encode()


_PLAIN = frozenset({type(None), bool, int, float, str})


def _no_json(value: Any, where: str) -> str:
    if isinstance(value, dict):
        for key, one in value.items():
            if not isinstance(key, str):
                return f"{where} has the key {key!r}, of type {type(key).__name__}"
            if type(one) not in _PLAIN and (trouble := _no_json(one, f"{where}[{key!r}]")):
                return trouble
        return ""
    if isinstance(value, list | tuple):
        for at, one in enumerate(value):
            if type(one) not in _PLAIN and (trouble := _no_json(one, f"{where}[{at}]")):
                return trouble
        return ""
    plain = value is None or isinstance(value, bool | int | float | str)  # subclasses such as numpy's float64, too
    return "" if plain else f"{where} is of type {type(value).__name__}"
