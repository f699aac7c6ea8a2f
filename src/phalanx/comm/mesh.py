"""The mesh: which ranks share which part of the work, as torch's DeviceMesh with Phalanx's names."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phalanx.spec import Plan


def data_mesh(plan: Plan, device: torch.device) -> DeviceMesh:
    """The mesh of a sharded plan: ``fsdp``, or ``dp`` × ``fsdp`` for a hybrid, rank order row by row."""
    if plan.dp == 1:
        return init_device_mesh(device.type, (plan.fsdp,), mesh_dim_names=("fsdp",))
    return init_device_mesh(device.type, (plan.dp, plan.fsdp), mesh_dim_names=("dp", "fsdp"))
