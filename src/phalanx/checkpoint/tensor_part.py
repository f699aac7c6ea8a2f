"""Tensors held in part: the blocks of the whole tensor on this rank.

A slice may be several separate ranges of a dimension (a fused projection, a zigzag of tokens), may be cut along several
dimensions, and may be a DTensor with rows shared out once more. All of these become blocks of the whole, each with a
view of the memory on this rank, and blocks are written and read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod

import torch
from torch import Tensor

from phalanx.comm.process_group import is_dtensor
from phalanx.errors import CheckpointError

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPart:
    """The part of a whole tensor of this shape held by one rank.

    Attributes:
        ranges: dimension → its ranges [start, stop) on this rank, in memory order. A dimension without an entry is
            whole.
        counts: whether this rank's values are saved; False for a copy that another rank saves.
    """

    shape: tuple[int, ...]
    ranges: Mapping[int, Ranges] = field(default_factory=dict[int, Ranges])
    counts: bool = True

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in self.along(dim)) for dim in range(len(self.shape)))

    def along(self, dim: int) -> Ranges:
        """Return the ranges of dimension ``dim`` on this rank."""
        return self.ranges.get(dim, ((0, self.shape[dim]),))


class PartTensor:
    """A slice and its part of the whole: used in place of a tensor in ``save`` and ``load``.

    ``local`` is a tensor, or a DTensor that shares the slice out over further ranks.
    """

    def __init__(self, local: Tensor, part: TensorPart) -> None:
        if tuple(local.shape) != part.local_shape:
            raise CheckpointError(
                f"a slice of shape {list(local.shape)} is said to be the part {list(part.local_shape)} of a tensor of "
                f"shape {list(part.shape)}"
            )
        self.local, self.part = local.detach(), part

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        return self.part.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def blocks(self) -> Mapping[tuple[int, ...], Tensor]:
        """Map each block's begin in the whole to the block, a view of this rank's memory."""
        return dict(_blocks(self))


def blocks_of(held: Tensor | PartTensor) -> Mapping[tuple[int, ...], Tensor]:
    """Map each local block's begin in the whole to the block, a view of this rank's memory.

    A whole without elements is one block of its own shape, so that it is recorded. Empty if this rank holds no
    elements.
    """
    if isinstance(held, PartTensor):
        return held.blocks
    offsets, block = _here(held.detach())
    return {offsets: block} if block.numel() or not prod(held.shape) else {}


def _blocks(held: PartTensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    first, here = _here(held.local)
    if not prod(held.shape):
        yield (0,) * len(held.shape), here.new_empty(held.shape)
        return
    box = [(at, at + size) for at, size in zip(first, here.shape, strict=True)]
    runs = (list(_runs(held.part.along(dim), *bounds)) for dim, bounds in enumerate(box))
    for corner in product(*runs):
        block = here
        for dim, (_, at, length) in enumerate(corner):
            block = block.narrow(dim, at, length)
        yield tuple(start for start, _, _ in corner), block


def _here(tensor: Tensor) -> tuple[tuple[int, ...], Tensor]:
    nowhere = (0,) * tensor.ndim
    if not is_dtensor(tensor):
        return nowhere, tensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shard = tensor.to_local()
    if not prod(tensor.shape):
        return nowhere, shard.new_empty(tensor.shape)
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if not prod(shape) or len(shape) != tensor.ndim:  # it has fewer rows than ranks, or is a mesh of other ranks
        return nowhere, shard.new_empty([0] * max(tensor.ndim, 1))
    if tuple(shard.shape) != tuple(shape):
        what = f"a shard of shape {list(shard.shape)} where {list(shape)} was to be"
        raise CheckpointError(f"a DTensor of shape {list(tensor.shape)} has {what}: it is sharded in a way of its own")
    return tuple(offsets), shard


def _runs(ranges: Ranges, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin in the whole tensor, begin behind ``first``, length) for elements [first, last) of a slice."""
    at = 0
    for start, stop in ranges:
        begin, end = max(at, first), min(at + stop - start, last)
        if begin < end:
            yield start + begin - at, begin - first, end - begin
        at += stop - start
