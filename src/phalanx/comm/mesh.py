"""The mesh: which ranks share which part of the work, as process groups and as torch's DeviceMesh."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phalanx.spec import Plan


def data_mesh(plan: Plan, device: torch.device) -> DeviceMesh:
    """The mesh of a sharded plan: ``fsdp``, or ``dp`` × ``fsdp`` for a hybrid, rank order row by row."""
    if plan.dp == 1:
        return init_device_mesh(device.type, (plan.fsdp,), mesh_dim_names=("fsdp",))
    return init_device_mesh(device.type, (plan.dp, plan.fsdp), mesh_dim_names=("dp", "fsdp"))


class Mesh:
    """The ranks of a plan along its dimensions, seen from one of them.

    Attributes:
        plan: the plan.
        rank: this process's rank.
        at: its place along each dimension.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.at = plan.coordinate(rank)
        self._groups: dict[tuple[str, ...], dist.ProcessGroup | None] = {}

    def size(self, *names: str) -> int:
        """Ranks along these dimensions together."""
        count = 1
        for name in names:
            count *= self.plan.mesh[name]
        return count

    def peers(self, *names: str) -> list[int]:
        """The ranks that differ from this one along these dimensions only, this one among them, in order."""
        return self._along(names, self.at)

    def group(self, *names: str) -> dist.ProcessGroup | None:
        """The process group of ``peers``; ``None`` where this rank is alone.

        Collective over all ranks of the run when first asked for: every rank asks for the same, in the same order.
        """
        key = tuple(name for name in self.plan.mesh if name in names and self.plan.mesh[name] > 1)
        if not key:
            return None
        if key not in self._groups:
            self._groups[key] = self._made(key)
        return self._groups[key]

    def among(self, axis: str, positions: Iterable[int]) -> dist.ProcessGroup | None:
        """The process group of the ranks at ``positions`` along ``axis``; ``None`` where this one is not among them.

        Collective over all ranks of the run.
        """
        positions, mine = list(positions), None
        for rank in range(self.plan.world_size):
            peers = self._along((axis,), self.plan.coordinate(rank))
            if rank == peers[0]:
                ranks = [peers[position] for position in positions]
                group = dist.new_group(ranks)
                if self.rank in ranks:
                    assert isinstance(group, dist.ProcessGroup)
                    mine = group
        return mine

    def sharding(self, device: torch.device, over: str, copies: Iterable[str]) -> DeviceMesh:
        """torch's mesh to shard over one dimension, in as many copies as there are ranks along others."""
        shard, copies = self.group(over), tuple(copies)
        replicas = self.group(*copies)
        assert shard is not None
        if replicas is None:
            return DeviceMesh.from_group(shard, device.type, mesh_dim_names=(over,))
        rows = [self._along((over,), self.plan.coordinate(rank)) for rank in self.peers(*copies)]
        return DeviceMesh.from_group([replicas, shard], device.type, mesh=rows, mesh_dim_names=("copies", over))

    def _along(self, names: Iterable[str], at: dict[str, int]) -> list[int]:
        sizes = self.plan.mesh
        chosen = [name for name in sizes if name in set(names)]
        found: list[int] = []
        for place in product(*(range(sizes[name]) for name in chosen)):
            where = {**at, **dict(zip(chosen, place, strict=True))}
            rank = 0
            for name, size in sizes.items():
                rank = rank * size + where[name]
            found.append(rank)
        return found

    def _made(self, key: tuple[str, ...]) -> dist.ProcessGroup:
        mine: dist.ProcessGroup | None = None
        if self.size(*key) == self.plan.world_size:
            mine = dist.distributed_c10d._get_default_group()
        else:
            seen: set[int] = set()
            for rank in range(self.plan.world_size):
                if rank in seen:
                    continue
                ranks = self._along(key, self.plan.coordinate(rank))
                seen.update(ranks)
                group = dist.new_group(ranks)
                if self.rank in ranks:
                    assert isinstance(group, dist.ProcessGroup)
                    mine = group
        assert mine is not None
        return mine
