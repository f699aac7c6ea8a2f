"""The mesh: ranks along the plan's dimensions, as process groups and DeviceMesh; groups across replicas.

Independent replicas: each is a world of its own, with its own default process group, and groups across replicas join
the ranks with the same part of the model. So ranks with the same place along ``dp`` form a replica, and code written
for a single run works inside it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import count
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo  # pyrefly: ignore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phalanx.comm.json_messages import gather_json
from phalanx.comm.process_group import Place, from_every_rank, group_timeout, keep, meet
from phalanx.config import Plan


def data_mesh(plan: Plan, device: torch.device) -> DeviceMesh:
    """Build the mesh of a sharded plan: ``fsdp``, or ``copies`` × ``fsdp`` for a hybrid, in rank order."""
    if plan.dp == 1:
        return init_device_mesh(device.type, (plan.fsdp,), mesh_dim_names=("fsdp",))
    return Mesh(plan, dist.get_rank()).sharding(device, ("dp",))


class Mesh:
    """The ranks of a plan along its dimensions, as seen from one rank with its place ``at`` along each."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.at = plan.coordinate(rank)
        self._groups: dict[tuple[str, ...], dist.ProcessGroup | None] = {}

    def size(self, *names: str) -> int:
        """Return the product of the ranks along these dimensions."""
        return prod(self.plan.mesh[name] for name in names)

    def peers(self, *names: str) -> list[int]:
        """Return, in order, the ranks that differ from this one along these dimensions only, with this one."""
        return self.plan.along(names, self.rank)

    def group(self, *names: str) -> dist.ProcessGroup | None:
        """Return the process group of ``peers``; ``None`` if this rank is alone.

        Collective over all ranks of the run at the first call: every rank asks for the same, in the same order.
        """
        key = tuple(name for name in self.plan.mesh if name in names and self.plan.mesh[name] > 1)
        if not key:
            return None
        if key not in self._groups:
            whole = self.size(*key) == self.plan.world_size
            default = dist.distributed_c10d._get_default_group
            self._groups[key] = default() if whole else self._joined(key, range(self.size(*key)))
        return self._groups[key]

    def among(self, axis: str, positions: Iterable[int]) -> dist.ProcessGroup | None:
        """Return the process group of the ranks at ``positions`` along ``axis``; ``None`` on other ranks.

        Collective over all ranks of the run.
        """
        return self._joined((axis,), list(positions))

    def sharding(self, device: torch.device, copies: Iterable[str]) -> DeviceMesh:
        """Build torch's mesh to shard over ``fsdp``, with a copy for each rank along other dimensions."""
        over, copies = "fsdp", tuple(copies)
        shard = self.group(over)
        replicas = self.group(*copies)
        assert shard is not None
        if replicas is None:
            return DeviceMesh.from_group(shard, device.type, mesh_dim_names=(over,))
        # a rank's number is a sum over its places, so that both dimensions add up; torch wants the ranks of all
        rows = torch.tensor(self.peers(*copies)).view(-1, 1) + torch.tensor(self.peers(over)) - self.rank
        return DeviceMesh.from_group([replicas, shard], device.type, mesh=rows, mesh_dim_names=("copies", over))

    def _joined(self, names: Collection[str], places: Sequence[int]) -> dist.ProcessGroup | None:
        """Return this rank's process group for the ``peers`` at ``places``.

        Each rank makes only its own groups. ``dist.new_group`` would visit the groups of all ranks first, and its total
        time grows with the square of the number of ranks.
        """
        if not _made_alone():
            return self._among_all(names, places)
        peers = self.peers(*names)
        return _group_of(sorted(peers[place] for place in places), self.rank)

    def _among_all(self, names: Collection[str], places: Sequence[int]) -> dist.ProcessGroup | None:
        """Make the same groups with torch's public function, which visits every group on every rank."""
        mine: dist.ProcessGroup | None = None
        for first in range(self.plan.world_size):
            peers = self.plan.along(names, first)
            if first != peers[0]:
                continue
            ranks = [peers[place] for place in places]
            group = dist.new_group(ranks, timeout=group_timeout())
            if self.rank in ranks:
                assert isinstance(group, dist.ProcessGroup)
                mine = group
        return mine


# The newest torch whose sources ``_group_of`` was read against. In 2.11, 2.12 and 2.13 ``_new_process_group_helper``
# takes the same arguments, makes the same backends and enters the group under its name in the same tables;
# ``new_group`` adds the places of ranks, as done here, and a barrier only where TORCH_DIST_INIT_BARRIER asks for one.
_READ = (2, 13)


def _made_alone() -> bool:
    """Return True if a rank can make its group without the other groups' ranks. The answer is equal on all ranks.

    False for an untested torch version, for NCCL bound to a device (it splits the communicator of all ranks), and for
    a default group with its own ``new_group``.
    """
    default = dist.distributed_c10d._get_default_group()
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return version <= _READ and default.bound_device_id is None and not hasattr(default, "new_group")


def _group_of(ranks: list[int], rank: int) -> dist.ProcessGroup | None:
    """Make a process group of ``ranks``; ranks outside it only count it and get ``None``.

    ``dist.new_group`` names a group by the number of groups made on all ranks. Here groups of different ranks share
    that number, so the name also contains the first rank. ``use_local_synchronization`` does not help: it names a group
    by the number of groups this rank is in, and stages with and without tied weights are in different numbers.
    """
    torch_groups, world = dist.distributed_c10d, dist.distributed_c10d._world
    number = world.group_count
    world.group_count += 1
    if rank not in ranks:
        return None
    backend, store = world.pg_map[torch_groups._get_default_group()]
    group, _ = torch_groups._new_process_group_helper(
        len(ranks),
        ranks.index(rank),
        ranks,
        torch_groups.Backend(backend),
        store,
        f"{number}/{ranks[0]}",  # pyrefly: ignore
        timeout=group_timeout(),
    )
    assert isinstance(group, dist.ProcessGroup)
    world.pg_group_ranks[group] = {one: place for place, one in enumerate(ranks)}
    return group


_joins = count()


def place_within(plan: Plan, place: Place) -> Place:
    """Return ``place`` within its replica if replicas are independent; else ``place``."""
    if plan.sync == "each":
        return place
    if place.store == "env://":
        meet(place)  # as the rank that it is among all, one of which may serve the store
    replica, rank = _seen(plan, place.rank)
    size = plan.world_size // plan.dp
    return replace(
        place, rank=rank, world_size=size, local_world_size=place.workers_here, group=f"{place.group}/{replica}"
    )


class Counterparts:
    """This rank's counterparts in the other replicas, which hold the same part of the model.

    Attributes:
        index: of this rank's replica; 0 is the first.
        size: replicas.
        group: the counterparts, by gloo: host tensors only.
    """

    def __init__(self, plan: Plan, place: Place) -> None:
        """Join the groups. Collective over all ranks of the run."""
        self.plan, self.size = plan, plan.dp
        self.index, self.rank = _seen(plan, place.rank)
        self.group = _gloo_group(f"across/{next(_joins)}/{self.rank}", place, self.index, self.size)

    @property
    def counts(self) -> bool:
        """Return True if this rank is in the replica that writes checkpoints and events."""
        return self.index == 0

    def start_sum(self, values: torch.Tensor) -> dist.Work:
        """Start to sum ``values``, on the host, over the counterparts, in place; all get the same bits."""
        work = dist.all_reduce(values, group=self.group, async_op=True)
        assert work is not None
        return work

    def sum(self, values: torch.Tensor) -> None:
        """Sum ``values`` over the counterparts, in place; on any device. Collective."""
        host = values if values.device.type == "cpu" else values.cpu()
        self.start_sum(host).wait()
        if host is not values:
            values.copy_(host)

    def named(self, rank: int) -> int:
        """Return the global rank for ``rank`` of this replica."""
        return _rank_of(self.plan, self.index, rank)

    def sent(self, nbytes: int) -> int:
        """Return the bytes a rank sends to sum ``nbytes``: gloo's ring sends each of n parts 2 (n - 1) times."""
        return 2 * (self.size - 1) * nbytes // self.size

    def from_counterparts(self, value: Any) -> list[Any]:
        """Return a small JSON-like value from each replica, in order. Collective."""
        return gather_json(value, self.group)

    def from_every_rank(self, value: Any) -> list[Any]:
        """Return a small JSON-like value from each rank of the run, in rank order. Collective."""
        found = from_every_rank(self.from_counterparts(value))
        seen = (_seen(self.plan, rank) for rank in range(self.plan.world_size))
        return [found[rank][replica] for replica, rank in seen]


def _seen(plan: Plan, rank: int) -> tuple[int, int]:
    at, inner = plan.coordinate(rank), 0
    for name, size in plan.mesh.items():
        if name != "dp":
            inner = inner * size + at[name]
    return at["dp"], inner


def _rank_of(plan: Plan, replica: int, rank: int) -> int:
    at: dict[str, int] = {"dp": replica}
    for name, size in reversed(plan.mesh.items()):
        if name != "dp":
            rank, at[name] = divmod(rank, size)
    found = 0
    for name, size in plan.mesh.items():
        found = found * size + at[name]
    return found


def _gloo_group(name: str, place: Place, rank: int, size: int) -> dist.ProcessGroup:
    store = PrefixStore(f"phalanx/{name}", meet(place))
    store.set_timeout(place.patience)
    group = ProcessGroup(store, rank, size)
    gloo = ProcessGroupGloo(store, rank, size, timeout=place.patience)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    keep(group)
    return group


def own_group() -> dist.ProcessGroup:
    """Make a new group of all ranks of the default one, with its backends. Collective."""
    group = dist.new_group(timeout=group_timeout())
    assert isinstance(group, dist.ProcessGroup)
    keep(group)
    return group
