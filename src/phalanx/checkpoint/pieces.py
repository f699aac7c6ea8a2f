"""Tensors of which this rank holds a slice: which blocks of the whole are here, told in DCP's words.

A slice may be several ranges of a dimension that lie apart in the whole (a fused projection, a zigzag of tokens), may
be cut along more than one dimension, and may itself be a DTensor whose rows are shared out once more. All of that comes
to blocks of the whole, each with a view of the memory here. DCP writes and reads blocks, and so needs no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from phalanx.errors import CheckpointError

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What one rank holds of a whole tensor.

    Attributes:
        shape: of the whole.
        ranges: dimension → the ranges [start, stop) of it that are here, in the order they have in memory. A dimension
            that is not named is here whole.
        counts: whether this rank's values are saved; not those of a copy that another rank holds and saves.
    """

    shape: tuple[int, ...]
    ranges: Mapping[int, Ranges] = field(default_factory=dict[int, Ranges])
    counts: bool = True

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of the slice."""
        return tuple(sum(stop - start for start, stop in self.along(dim)) for dim in range(len(self.shape)))

    def along(self, dim: int) -> Ranges:
        """The ranges of dimension ``dim`` that are here."""
        return self.ranges.get(dim, ((0, self.shape[dim]),))


class Pieces:
    """A slice and what it is a part of: stands where a tensor would in ``save`` and ``load``.

    Attributes:
        local: the slice: a tensor, or a DTensor that shares it out over further ranks.
        part: which part of the whole it is.
    """

    def __init__(self, local: Tensor, part: Part) -> None:
        if tuple(local.shape) != part.local_shape:
            raise CheckpointError(
                f"a slice of shape {list(local.shape)} is said to be the part {list(part.local_shape)} of a tensor of "
                f"shape {list(part.shape)}"
            )
        self.local, self.part = local.detach(), part
        self._found: dict[torch.Size, Tensor] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self.part.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def blocks(self) -> Mapping[torch.Size, Tensor]:
        """Where in the whole each block begins → the block, as a view of this rank's memory."""
        if self._found is None:
            self._found = {torch.Size(start): block for start, block in self._blocks()}
        return self._found

    def _blocks(self) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        here = self.local.to_local() if isinstance(self.local, DTensor) else self.local
        if not prod(self.shape):
            # No block has an element, but the checkpoint is to know the tensor.
            yield (0,) * len(self.shape), here.new_empty(self.shape)
            return
        box = [(0, size) for size in self.local.shape]
        if isinstance(self.local, DTensor):
            (chunk,) = self.local.__create_chunk_list__()
            box = [(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        runs = (list(_runs(self.part.along(dim), *bounds)) for dim, bounds in enumerate(box))
        for corner in product(*runs):
            block = here
            for dim, (_, at, length) in enumerate(corner):
                block = block.narrow(dim, at, length)
            yield tuple(start for start, _, _ in corner), block

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=start, sizes=block.shape) for start, block in self.blocks.items()]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        if not self.part.counts:
            return []
        size = torch.Size(self.shape)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=size),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.blocks[index.offset]


class Writing(DefaultSavePlanner):
    """DCP's planner of a save, for tensors and ``Pieces``."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        held = self.state_dict[index.fqn]
        return held.__get_tensor_shard__(index) if isinstance(held, Pieces) else super().lookup_object(index)


class Reading(DefaultLoadPlanner):
    """DCP's planner of a load, for tensors and ``Pieces``."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # DCP's own puts None in the place of what it does not know.
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        held = self.state_dict[index.fqn]
        return held.__get_tensor_shard__(index) if isinstance(held, Pieces) else super().lookup_tensor(index)


def _runs(ranges: Ranges, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Of elements [first, last) of a slice made of ``ranges``: begin in the whole, begin behind ``first``, length."""
    at = 0
    for start, stop in ranges:
        begin, end = max(at, first), min(at + stop - start, last)
        if begin < end:
            yield start + begin - at, begin - first, end - begin
        at += stop - start
