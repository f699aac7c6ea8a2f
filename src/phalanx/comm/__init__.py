"""Process groups, meshes and the few collectives that are Phalanx's own."""

from phalanx.comm.across import Across, place_within, within
from phalanx.comm.collectives import (
    active,
    all_gather_flat,
    found_by_first,
    from_every_rank,
    reduce_scatter_sum,
    sum_over_ranks,
)
from phalanx.comm.mesh import Mesh, data_mesh
from phalanx.comm.place import Place, device_for, joined
from phalanx.comm.shards import is_dtensor, local

__all__ = [
    "Across",
    "Mesh",
    "Place",
    "active",
    "all_gather_flat",
    "data_mesh",
    "device_for",
    "found_by_first",
    "from_every_rank",
    "is_dtensor",
    "joined",
    "local",
    "place_within",
    "reduce_scatter_sum",
    "sum_over_ranks",
    "within",
]
