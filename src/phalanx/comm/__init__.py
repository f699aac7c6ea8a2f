"""Process groups, meshes and the few collectives that are Phalanx's own."""

from phalanx.comm.mesh import Counterparts, Mesh, data_mesh, group_of_run, place_within
from phalanx.comm.process_group import (
    Place,
    active,
    all_gather_flat,
    default_process_group,
    device_for,
    found_by_first,
    from_every_rank,
    is_dtensor,
    local,
    reduce_scatter_sum,
    share_timeout,
    sum_over_ranks,
)

__all__ = [
    "Counterparts",
    "Mesh",
    "Place",
    "active",
    "all_gather_flat",
    "data_mesh",
    "default_process_group",
    "device_for",
    "found_by_first",
    "from_every_rank",
    "group_of_run",
    "is_dtensor",
    "local",
    "place_within",
    "reduce_scatter_sum",
    "share_timeout",
    "sum_over_ranks",
]
