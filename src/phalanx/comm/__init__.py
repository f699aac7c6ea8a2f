"""Process groups, meshes and Phalanx's own few collectives."""

from phalanx.comm.mesh import Counterparts, Mesh, data_mesh, place_within
from phalanx.comm.point_agreement import PointAgreement
from phalanx.comm.process_group import (
    Place,
    active,
    alike,
    all_gather_flat,
    default_process_group,
    device_for,
    found_by_first,
    from_every_rank,
    is_dtensor,
    local,
    meet,
    reduce_scatter_sum,
    share_timeout,
    sum_over_ranks,
)

__all__ = [
    "Counterparts",
    "Mesh",
    "Place",
    "PointAgreement",
    "active",
    "alike",
    "all_gather_flat",
    "data_mesh",
    "default_process_group",
    "device_for",
    "found_by_first",
    "from_every_rank",
    "is_dtensor",
    "local",
    "meet",
    "place_within",
    "reduce_scatter_sum",
    "share_timeout",
    "sum_over_ranks",
]
