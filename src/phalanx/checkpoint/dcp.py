"""DCP's storage layer, with safetensors files and a JSON manifest in the place of pickles.

DCP plans who writes which shard and, on loading, who reads which part of which shard; this is where the bytes go.

Tensors of which this rank holds a slice: which blocks of the whole are here, told in DCP's words. A slice may be
several ranges of a dimension that lie apart in the whole (a fused projection, a zigzag of tokens), may be cut along
more than one dimension, and may itself be a DTensor whose rows are shared out once more. All of that comes to blocks of
the whole, each with a view of the memory here. DCP writes and reads blocks, and so needs no more.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from phalanx.checkpoint.all_ranks import grouped, some
from phalanx.checkpoint.format import Chunk, Manifest, StoredFile, StoredTensor, TensorEntry, write_tensors
from phalanx.errors import CheckpointError

T = TypeVar("T")


class ShardWriter(StorageWriter):
    """Writes this rank's chunks to ``rank-NNNNN.safetensors`` in ``folder``; ranks with nothing to write write no file.

    Args:
        folder: exists on, or is created by, the coordinator before any rank writes.
        begin: run by the coordinator before anything is written; creates ``folder``.
        complete: run by the coordinator once all ranks have written, with all tensors and files.
    """

    def __init__(
        self,
        folder: Path,
        *,
        begin: Callable[[], None],
        complete: Callable[[dict[str, StoredTensor], dict[str, StoredFile]], None],
    ) -> None:
        self._folder, self._begin, self._complete = folder, begin, complete

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        return None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            self._begin()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        others = [item.index.fqn for item in plan.items if item.type == WriteItemType.BYTE_IO]
        if others:
            raise CheckpointError(f"not tensors, so they would have to be pickled: {some(others)}")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        if plan.items:
            if not self._folder.is_dir():
                raise CheckpointError(f"{self._folder.parent} is not on storage that all ranks share")
            rank = dist.get_rank() if grouped() else 0
            # Large to small keeps every tensor aligned to its own element size behind the header.
            items = sorted(plan.items, key=lambda item: -_entry(item, alone=True).dtype.itemsize)
            blocks = Counter(item.index.fqn for item in items)
            entries = [_entry(item, alone=blocks[item.index.fqn] == 1) for item in items]
            tensors = (cast(Tensor, planner.resolve_data(item)) for item in items)
            file = write_tensors(self._folder / f"rank-{rank:05d}.safetensors", entries, tensors)
            results = [
                WriteResult(index=item.index, size_in_bytes=file.size, storage_data=(file, entry.key))
                for item, entry in zip(items, entries, strict=True)
            ]
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written: dict[MetadataIndex, tuple[StoredFile, str]] = {
            result.index: result.storage_data for rank in results for result in rank
        }
        files = {file.name: file for file, _ in written.values()}
        tensors: dict[str, StoredTensor] = {}
        for name, tensor in metadata.state_dict_metadata.items():
            chunks = []
            for chunk in tensor.chunks:  # type: ignore[union-attr]
                file, key = written[MetadataIndex(name, chunk.offsets)]
                chunks.append(Chunk(offsets=tuple(chunk.offsets), sizes=tuple(chunk.sizes), file=file.name, key=key))
            shape, dtype = tuple(tensor.size), tensor.properties.dtype  # type: ignore[union-attr]
            tensors[name] = StoredTensor(shape=shape, dtype=dtype, chunks=tuple(chunks))
        self._complete(tensors, files)


class ShardReader(StorageReader):
    """Reads the chunks that ``manifest`` lists from ``folder``; only the bytes a rank needs are read from disk."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._metadata = _in_words_of_dcp(manifest)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        return None

    # No **kwargs here: DCP would take it as an offer of one metadata file per rank.
    def read_metadata(self) -> Metadata:  # type: ignore[override]
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        return None

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[ReadItem, str]]] = defaultdict(list)
        for item in plan.items:
            chunk = self._metadata.storage_data[item.storage_index]
            by_file[chunk.file].append((item, chunk.key))
        with ExitStack() as files, torch.no_grad():
            for name, wanted in by_file.items():
                file = files.enter_context(safe_open(self._folder / name, framework="pt", device="cpu"))
                for item, key in wanted:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_part(file.get_tensor(key), item))
                    planner.commit_tensor(item, target)
        return _done(None)


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


def _entry(item: WriteItem, *, alone: bool) -> TensorEntry:
    """``alone``: the only block of its tensor in this file; others are told apart by where they begin."""
    data = item.tensor_data
    assert data is not None
    key = item.index.fqn if alone else f"{item.index.fqn}@{','.join(map(str, data.chunk.offsets))}"
    return TensorEntry(key=key, dtype=data.properties.dtype, shape=tuple(data.chunk.sizes))


def _part(chunk: Tensor, item: ReadItem) -> Tensor:
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        chunk = chunk.narrow(dim, start, length)
    return chunk


def _in_words_of_dcp(manifest: Manifest) -> Metadata:
    """The manifest as DCP has it, with the chunk behind every index as its storage data."""
    tensors: dict[str, Any] = {}
    storage: dict[MetadataIndex, Chunk] = {}
    for name, tensor in manifest.tensors.items():
        chunks = [
            ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
            for chunk in tensor.chunks
        ]
        tensors[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=tensor.dtype), size=torch.Size(tensor.shape), chunks=chunks
        )
        storage |= {MetadataIndex(name, chunk.offsets): chunk for chunk in tensor.chunks}
    return Metadata(state_dict_metadata=tensors, storage_data=storage)


Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPart:
    """What one rank holds of a whole tensor of this shape.

    Attributes:
        ranges: dimension → the ranges [start, stop) of it that are here, in the order they have in memory. A dimension
            that is not named is here whole.
        counts: whether this rank's values are saved; not those of a copy that another rank holds and saves.
    """

    shape: tuple[int, ...]
    ranges: Mapping[int, Ranges] = field(default_factory=dict[int, Ranges])
    counts: bool = True

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in self.along(dim)) for dim in range(len(self.shape)))

    def along(self, dim: int) -> Ranges:
        """The ranges of dimension ``dim`` that are here."""
        return self.ranges.get(dim, ((0, self.shape[dim]),))


class PartTensor:
    """A slice and the part of a whole that it is: stands where a tensor would in ``save`` and ``load``.

    ``local`` is a tensor, or a DTensor that shares the slice out over further ranks.
    """

    def __init__(self, local: Tensor, part: TensorPart) -> None:
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
    """DCP's planner of a save, for tensors and ``PartTensor``."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        held = self.state_dict[index.fqn]
        return held.__get_tensor_shard__(index) if isinstance(held, PartTensor) else super().lookup_object(index)


class PartLoadPlanner(DefaultLoadPlanner):
    """DCP's planner of a load, for tensors and ``PartTensor``."""

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
        return held.__get_tensor_shard__(index) if isinstance(held, PartTensor) else super().lookup_tensor(index)


def _runs(ranges: Ranges, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Of elements [first, last) of a slice made of ``ranges``: begin in the whole, begin behind ``first``, length."""
    at = 0
    for start, stop in ranges:
        begin, end = max(at, first), min(at + stop - start, last)
        if begin < end:
            yield start + begin - at, begin - first, end - begin
        at += stop - start
