"""Counts the bytes that one rank sends: every collective and every message, whoever starts it.

torch hands each of them, also those of DistributedDataParallel and FSDP2, to an operator of ``c10d``, which a dispatch
mode sees. What an operator sends is that of the algorithms that send least: rings for all-reduce, all-gather and
reduce-scatter (Patarasu and Yuan 2009), one message for each pair otherwise.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode


class Sent(TorchDispatchMode):
    """While entered, counts what this rank sends.

    Attributes:
        bytes_of: (kind of operation, ranks of its group) → bytes.
        calls_of: the same → calls.
        exchanges: (kind of operation, ranks that take part, bytes of the whole) → times; of a message its two ranks,
            where it is sent, and of an all-to-all what this rank hands in.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes_of: defaultdict[tuple[str, int], float] = defaultdict(float)
        self.calls_of: Counter[tuple[str, int]] = Counter()
        self.exchanges: Counter[tuple[str, tuple[int, ...], int]] = Counter()

    @property
    def total(self) -> float:
        """Bytes of all kinds."""
        return sum(self.bytes_of.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(func.overloadpacket.__name__, args)
        elif func.namespace == "_c10d_functional":
            raise NotImplementedError(f"{func}: functional collectives are not counted yet")
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Sequence[Any]) -> None:
        if name not in _SENDS:
            raise NotImplementedError(f"c10d::{name} is not counted yet")
        kind, sends = _SENDS[name]
        if sends is None:
            return
        group = next(ProcessGroup.unbox(one) for one in args if isinstance(one, torch.ScriptObject))
        key = kind, group.size()
        self.bytes_of[key] += sends(group, args)
        self.calls_of[key] += 1
        ranks = dist.get_process_group_ranks(group)
        if kind == "send":
            ranks = sorted((dist.get_rank(), ranks[args[2]]))
        whole = args[1] if kind in ("reduce_scatter", "all_to_all") else args[0]
        self.exchanges[kind, tuple(ranks), _size(whole)] += 1


def _size(what: Any) -> int:
    if isinstance(what, Tensor):
        return what.numel() * what.element_size()
    return sum(_size(one) for one in what)


def _ring_twice(group: ProcessGroup, args: Sequence[Any]) -> float:
    return 2 * (group.size() - 1) / group.size() * _size(args[0])


def _part_onward(group: ProcessGroup, args: Sequence[Any]) -> float:
    return (group.size() - 1) * _size(args[1])


def _all_but_own(group: ProcessGroup, args: Sequence[Any]) -> float:
    return (group.size() - 1) / group.size() * _size(args[1])


def _to_others(group: ProcessGroup, args: Sequence[Any]) -> float:
    given, splits = args[1], args[4]
    if not splits:
        return _all_but_own(group, args)
    rows = len(given) - splits[group.rank()]
    return rows * _size(given) / len(given) if len(given) else 0


def _message(_: ProcessGroup, args: Sequence[Any]) -> float:
    return _size(args[0])


def _passed_on(group: ProcessGroup, args: Sequence[Any]) -> float:
    return (group.size() - 1) / group.size() * _size(args[0])


_SENDS: dict[str, tuple[str, Callable[[ProcessGroup, Sequence[Any]], float] | None]] = {
    "allreduce_": ("all_reduce", _ring_twice),
    "_allgather_base_": ("all_gather", _part_onward),
    "allgather_": ("all_gather", _part_onward),
    "_reduce_scatter_base_": ("reduce_scatter", _all_but_own),
    "reduce_scatter_": ("reduce_scatter", _all_but_own),
    "alltoall_base_": ("all_to_all", _to_others),
    "send": ("send", _message),
    "broadcast_": ("broadcast", _passed_on),
    "recv_": ("receive", None),
    "barrier": ("barrier", None),
}
