"""Agreement on the writer of each tensor block: rank 0 decides, and each rank receives its own part.

Only rank 0 keeps the list of all blocks, because it writes the manifest; every other rank keeps its own. Ranks with
equal blocks describe them once.
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
    """The assignment of blocks to writers, as this rank knows it.

    Attributes:
        digest: of this rank's tensors; if it is unchanged on all ranks, so is the assignment.
        stored: tensors in stored form: all of them on rank 0; on others their own, without the chunks.
        writers: of all blocks on rank 0, of its own blocks on other ranks.
    """

    digest: str
    stored: Mapping[str, StoredTensor]
    writers: WriterAssignment


def agree(said: Description) -> Agreement:
    """Agree on the writer of each block held by the default group; ``said`` describes this rank's blocks.

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
    """Return the blocks written by each rank, in rank order."""
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
