"""The assignment of tensor blocks to writers, and the writing; values that are not finite are refused.

Every rank describes its blocks. A block held by several ranks is assigned to one of them so that all write about as
many bytes (``agreement.py`` makes the ranks agree on it).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.all_ranks import some
from phalanx.checkpoint.format import DTYPES, Box, Chunk, StoredFile, StoredTensor, dtype_name, key_of, not_filled
from phalanx.checkpoint.shard_file import TensorEntry, bytes_of, header_of, write_file
from phalanx.checkpoint.tensor_part import PartTensor, blocks_of
from phalanx.errors import CheckpointError

Tensors = Mapping[str, Tensor | PartTensor]
Description = dict[str, Any]
"""Name → dtype, global shape, whether its values count, and the boxes that are here; JSON."""

_PIECE = 1 << 15  # torch computes on no more elements than these without starting threads of its own

WriterAssignment = dict[str, dict[Box, int]]
"""Name → box → the rank that writes it; no box for what is held as copies only."""


def describe(tensors: Tensors) -> tuple[Description, dict[tuple[str, tuple[int, ...]], Tensor]]:
    """Return this rank's blocks as JSON, and the memory of each block by name and begin."""
    said: Description = {}
    memory: dict[tuple[str, tuple[int, ...]], Tensor] = {}
    for name, held in tensors.items():
        blocks = blocks_of(held)
        counts = held.part.counts if isinstance(held, PartTensor) else True
        boxes = [[list(offsets), list(block.shape)] for offsets, block in blocks.items()]
        said[name] = [dtype_name(held.dtype), list(held.shape), counts, boxes]
        memory |= {(name, offsets): block for offsets, block in blocks.items()}
    return said, memory


def assign_writers(
    descriptions: Sequence[Description], of_rank: Sequence[int]
) -> tuple[dict[str, StoredTensor], WriterAssignment]:
    """Return all tensors in stored form, and the writer of each block.

    Args:
        descriptions: the different ones.
        of_rank: each rank's index into them.

    Raises:
        CheckpointError: ranks hold a tensor in different forms, or not every element exactly once.
    """
    forms = _forms(descriptions)
    holders: dict[str, dict[Box, list[int]]] = {name: {} for name in forms}
    for rank, index in enumerate(of_rank):
        for name, (_, _, counts, boxes) in descriptions[index].items():
            for offsets, sizes in boxes if counts else ():
                holders[name].setdefault((tuple(offsets), tuple(sizes)), []).append(rank)
    if copies := [name for name, boxes in holders.items() if not boxes and math.prod(forms[name][1])]:
        why = "held as copies only, each to be saved by a rank that does not have it"
        raise CheckpointError(f"{why}: {some(copies)}")
    writers = _balance_bytes(holders, {name: DTYPES[dtype].itemsize for name, (dtype, _) in forms.items()})
    stored: dict[str, StoredTensor] = {}
    for name, (dtype, shape) in forms.items():
        if wrong := not_filled(shape, holders[name]):
            raise CheckpointError(f"what the ranks hold of {name} is not all of it once: {wrong}")
        chunks = [
            Chunk(offsets=box[0], sizes=box[1], file=file_of(rank), key=key_of(name, shape, box))
            for box, rank in sorted(writers[name].items())
        ]
        stored[name] = StoredTensor(shape=tuple(shape), dtype=DTYPES[dtype], chunks=tuple(chunks))
    return stored, writers


def file_of(rank: int) -> str:
    """Return the name of the file written by ``rank``."""
    return f"rank-{rank:05d}.safetensors"


def _forms(descriptions: Sequence[Description]) -> dict[str, tuple[str, tuple[int, ...]]]:
    forms: dict[str, tuple[str, tuple[int, ...]]] = {}
    for said in descriptions:
        for name, (dtype, shape, _, _) in said.items():
            form = (dtype, tuple(shape))
            if forms.setdefault(name, form) != form:
                other = " and ".join(f"{kind}{list(size)}" for kind, size in (forms[name], form))
                raise CheckpointError(f"the ranks hold {name} in different forms: {other}")
    return forms


def _balance_bytes(holders: Mapping[str, Mapping[Box, list[int]]], itemsizes: Mapping[str, int]) -> WriterAssignment:
    """Assign large blocks first, each to its holder with the fewest bytes so far."""
    load: dict[int, int] = {}
    writers: WriterAssignment = {name: {} for name in holders}
    blocks = [
        (len(ranks) > 1, -math.prod(box[1]) * itemsizes[name], name, box, ranks)
        for name, boxes in holders.items()
        for box, ranks in boxes.items()
    ]
    for _, size, name, box, ranks in sorted(blocks, key=lambda block: block[:4]):
        writer = min(ranks, key=lambda rank: (load.get(rank, 0), rank))
        load[writer] = load.get(writer, 0) - size
        writers[name][box] = writer
    return writers


@dataclass(frozen=True, kw_only=True, slots=True)
class FileContent:
    """The content of one rank's file: ``entries`` in order, and the memory of each.

    Attributes:
        names: the tensor of each entry.
        given_up: once it is set, writing ends early.
        infinite: names of tensors that may hold infinities.
    """

    entries: list[TensorEntry]
    tensors: list[Tensor]
    names: list[str]
    infinite: Collection[str]
    given_up: Event = field(default_factory=Event)

    @classmethod
    def of(
        cls,
        rank: int,
        stored: Mapping[str, StoredTensor],
        writers: WriterAssignment,
        memory: Mapping[tuple[str, tuple[int, ...]], Tensor],
        infinite: Collection[str],
    ) -> FileContent:
        """Return the blocks of ``stored`` written by ``rank``; ``memory`` has this rank's blocks by name and begin."""
        boxes = [(name, (offsets, tuple(block.shape))) for (name, offsets), block in memory.items()]
        mine = [(name, box) for name, box in boxes if writers.get(name, {}).get(box) == rank]
        # Large to small keeps every tensor aligned to its own element size behind the header.
        mine.sort(key=lambda block: -stored[block[0]].dtype.itemsize)
        entries = [
            TensorEntry(key=key_of(name, stored[name].shape, box), dtype=stored[name].dtype, shape=box[1])
            for name, box in mine
        ]
        tensors = [memory[name, offsets] for name, (offsets, _) in mine]
        return cls(entries=entries, tensors=tensors, names=[name for name, _ in mine], infinite=infinite)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    def write(self, path: Path) -> StoredFile | None:
        """Write the safetensors file ``path``, one tensor at a time; return ``None`` if there is no tensor.

        Raises:
            OSError: it cannot be written.
            CheckpointError: a value is not finite.
        """
        return write_file(path, self._pieces()) if self.entries else None

    def copied_to(self, memory: Tensor, given_up: Event) -> FileContent:
        """Return a copy in ``memory``, bytes on the host; its writing ends early once ``given_up`` is set."""
        at, copies = 0, list[Tensor]()
        for entry, tensor in zip(self.entries, self.tensors, strict=True):
            here = memory[at : at + entry.nbytes].view(entry.dtype).view(entry.shape)
            copies.append(here.copy_(tensor.detach(), non_blocking=memory.is_pinned()))
            at += entry.nbytes
        if memory.is_pinned():
            torch.accelerator.synchronize()  # only an accelerator has memory pinned
        return replace(self, tensors=copies, given_up=given_up)

    def _pieces(self) -> Iterator[memoryview | bytes]:
        yield header_of(self.entries)
        for name, tensor in zip(self.names, self.tensors, strict=True):
            if self.given_up.is_set():
                raise CheckpointError("the save was given up: the run ended before it was done")
            here = tensor.detach().cpu().contiguous()
            refuse_not_finite(name, here, infinite=name in self.infinite)
            yield bytes_of(here)


def refuse_not_finite(name: str, tensor: Tensor, *, infinite: bool) -> None:
    """Refuse to publish NaN, and infinities unless ``infinite``; ``tensor`` is contiguous, on the host.

    Raises:
        CheckpointError: with the number of such values.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return
    numbers = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)
    if all(_finite(piece, infinite) for piece in numbers.split(_PIECE)):
        return
    numbers = numbers.float()
    nans, infinities = int(numbers.isnan().sum()), int(numbers.isinf().sum())
    found = " and ".join(f"{count} {what}" for count, what in ((nans, "NaN"), (infinities, "infinite")) if count)
    raise CheckpointError(f"{name} is not finite ({found} of {numbers.numel()} values); nothing of it is published")


def _finite(numbers: Tensor, infinite: bool) -> bool:
    # NaN is both the least and the greatest where there is one: one pass, several times faster than isfinite.
    least, greatest = (float(one) for one in torch.aminmax(numbers.float() if numbers.itemsize == 1 else numbers))
    return least == least and (infinite or abs(least) != math.inf != abs(greatest))
