"""Epochs that a stream shares with other processes.

So that ``set_epoch`` reaches processes that read already, streams of ``datasets`` keep their epoch in a tensor in
shared memory, and others in a ``multiprocessing.Value``. Here each process begins its passes by itself, and one that is
ahead would move those behind it to its own pass, in another order.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import torch

_DEPTH = 4  # of streams that read streams


def with_own_epoch(stream: Any) -> Any:
    """Return ``stream``, or a shallow copy with epochs that other processes cannot change, inner streams included.

    Single numbers in shared memory are taken for epochs; larger tensors, which may be data, stay shared.
    """
    return _own(stream, _DEPTH)


def _own(value: Any, depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone() if value.numel() == 1 and value.is_shared() else value
    if isinstance(value, Synchronized):
        return multiprocessing.Value(type(value.get_obj()), value.value)
    if depth == 0:
        return value
    if type(value) in (list, tuple):
        owned = [_own(one, depth - 1) for one in value]
        return value if _same(owned, value) else type(value)(owned)
    if type(value) is dict:
        owned = {name: _own(one, depth - 1) for name, one in value.items()}
        return value if _same(owned.values(), value.values()) else owned
    if isinstance(value, type) or not (hasattr(value, "__dict__") and hasattr(value, "__iter__")):
        return value
    changed = {name: new for name, old in vars(value).items() if (new := _own(old, depth - 1)) is not old}
    if not changed:
        return value
    other = object.__new__(type(value))  # and not copy(): what streams do with a state may give both one dictionary
    other.__dict__ = {**vars(value), **changed}
    return other


def _same(new: Any, old: Any) -> bool:
    return all(one is other for one, other in zip(new, old, strict=True))
