"""Who writes which block of which tensor, agreed between all ranks: rank 0 works it out, each rank hears its own part.

What all ranks have is in one place, rank 0, which writes the manifest of it anyway; any other rank holds what it has
itself. Of ranks that have the same one describes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from phalanx.checkpoint.all_ranks import different_at_first, digest_of, grouped
from phalanx.checkpoint.format import DTYPES, StoredTensor
from phalanx.checkpoint.writing import Description, WriterAssignment, assign_writers
from phalanx.comm.json_messages import broadcast_json, scatter_json
from phalanx.errors import CheckpointError

Part = list[list[Any]]
"""What one rank writes: name of a tensor, where a block of it begins and its sizes; JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Who writes what, as far as this rank is concerned.

    Attributes:
        digest: of what this rank has; where that is the same on all ranks as it was, the same is agreed.
        stored: the tensors as they will be stored: all of them on rank 0, on others those that they have, without the
            chunks.
        writers: of the blocks: of all on rank 0, of its own on others.
    """

    digest: str
    stored: Mapping[str, StoredTensor]
    writers: WriterAssignment


def agree(said: Description) -> Agreement:
    """Agree on who writes what of what the ranks of the default group have, ``said`` being what this one has.

    Collective. Without a group this process writes all of it.

    Raises:
        CheckpointError: on all ranks: they have one tensor in different forms, or do not have all of it once.
    """
    digest = digest_of(said)
    if not grouped() or dist.get_world_size() == 1:
        stored, writers = assign_writers([said], [0])
        return Agreement(digest=digest, stored=stored, writers=writers)
    different, of_rank = different_at_first(said)
    if dist.get_rank():
        if failed := broadcast_json(None):
            raise CheckpointError(failed)
        mine: Part = scatter_json(())
        return Agreement(digest=digest, stored=_forms(said), writers=_writers(mine, dist.get_rank()))
    try:
        stored, writers = assign_writers(different, of_rank)
    except CheckpointError as error:
        broadcast_json(str(error))
        raise
    broadcast_json("")
    scatter_json(parts_of(writers, len(of_rank)))
    return Agreement(digest=digest, stored=stored, writers=writers)


def parts_of(writers: WriterAssignment, world_size: int) -> Sequence[Part]:
    """What each rank writes, by rank."""
    parts: list[Part] = [[] for _ in range(world_size)]
    for name, boxes in writers.items():
        for (offsets, sizes), rank in boxes.items():
            parts[rank].append([name, offsets, sizes])
    return parts


def _writers(mine: Part, rank: int) -> WriterAssignment:
    writers: WriterAssignment = {}
    for name, offsets, sizes in mine:
        writers.setdefault(name, {})[tuple(offsets), tuple(sizes)] = rank
    return writers


def _forms(said: Description) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(shape=tuple(shape), dtype=DTYPES[dtype], chunks=())
        for name, (dtype, shape, _, _) in said.items()
    }
