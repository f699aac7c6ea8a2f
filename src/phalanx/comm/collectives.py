"""Collectives under the one name that every supported torch knows, sums over ranks, and what is a shard."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


T = TypeVar("T")

# torch 2.13 renamed these two and warns at the old names, which 2.11 and 2.12 have alone.
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_scatter_sum(out: torch.Tensor, flat: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start summing ``flat`` (ranks × out.numel()) over the group, this rank keeping its own part in ``out``."""
    return _reduce_scatter(out, flat, op=dist.ReduceOp.SUM, group=group, async_op=True)


def all_gather_flat(out: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill ``out`` (ranks × part.numel()) with every rank's ``part``, in rank order."""
    _all_gather(out, part, group=group)


def active() -> bool:
    """Whether there are other workers to talk to."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def sum_over_ranks(values: torch.Tensor) -> None:
    """Sum ``values`` over all workers, in place."""
    if active():
        dist.all_reduce(values)


def from_every_rank(value: Any) -> list[Any]:
    """One small JSON-like value from each worker, in rank order."""
    if not active():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def found_by_first(find: Callable[[], T]) -> T:
    """What rank 0 finds, on every rank; what it raises is raised on every rank. Collective.

    For what is the same on every rank and takes long: processes that share cores would look for it in turn.
    """
    if not active():
        return find()
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = find()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether ``tensor`` is a DTensor. There is none before its module is loaded."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of ``tensor``."""
    return tensor.to_local() if is_dtensor(tensor) else tensor
