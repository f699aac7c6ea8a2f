"""A worker's place among all workers, joining and leaving them, and collectives of all workers."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyrefly: ignore

from phalanx.comm.json_messages import alike_everywhere, as_json, broadcast_json, gather_json
from phalanx.comm.roll_call import meet_all
from phalanx.config.run import TIMEOUT
from phalanx.device_kinds import kind_named, kind_of
from phalanx.errors import RunError, error_from_dict, error_to_dict

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A worker's place among ``world_size`` workers.

    Attributes:
        local_rank: among the workers of this machine; picks the CUDA device.
        local_world_size: workers on this machine; 0 if all of the run's are here.
        store: the workers' key-value store: ``tcp://host:port`` for one already served, or ``env://`` for one served by
            a launcher such as torchrun.
        host: this worker's address for other workers.
        number: of the run, among successive runs of the same workers.
        group: name of these workers within the store, if they are not all of its workers.
        secret: of the run, for parameter servers and workers; empty without servers.
        timeout: seconds that workers wait for each other: at the store and in every process group.
        meeting: the store's address in torchrun's variables, ``host:port``.
        torchrun: whether a torchrun agent has started this process.
        agent: whether torchrun's agent serves the store, through all its restarts of workers; else rank 0 does.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 0
    store: str = ""
    host: str = "127.0.0.1"
    number: int = 0
    group: str = ""
    secret: bytes = field(default=b"", repr=False)
    timeout: float = TIMEOUT
    meeting: str = ""
    agent: bool = False
    torchrun: bool = False

    @property
    def patience(self) -> timedelta:
        """Return the timeout in torch's form."""
        return timedelta(seconds=self.timeout)

    @property
    def workers_here(self) -> int:
        """Return the number of the run's workers on this machine."""
        return self.local_world_size or self.world_size


_left: list[object] = []
_stores: dict[tuple[int, str], Store] = {}
_joins = count()


def device_for(place: Place, device: str) -> torch.device:
    """Return this worker's device: the one with its local rank, of kind ``device``.

    Raises:
        RunError: if this worker was forked from a process that had already used an accelerator.
    """
    kind = kind_named(device)
    if kind.spoilt():
        raise RunError(
            f"this process has already asked {kind.label} something, and workers forked from it cannot use "
            f"{kind.label} any more\n    try: {kind.light_way}, which asks nothing that "
            "outlives the call; or phalanx train JOB from the command line"
        )
    return kind.device(place.local_rank)


def meet(place: Place) -> Store:
    """Return the key-value store of all workers; repeated calls return the same one.

    Raises:
        RunError: if not all workers that torchrun's variables tell of come within the timeout.

    Keys stay in the store: write only under a prefix never used before.
    """
    key = os.getpid(), place.store  # a client that was forked is another process's, or of a store that is gone
    if key not in _stores:
        if place.store == "env://":
            _stores[key] = meet_all(place)
        else:
            host, _, port = place.store.removeprefix("tcp://").rpartition(":")
            _stores[key] = TCPStore(host, int(port), is_master=False, timeout=place.patience)
    return _stores[key]


@contextmanager
def default_process_group(place: Place, device: torch.device, named: str = "auto") -> Iterator[None]:
    """Join the default process group for the length of the block; nothing for a world of one.

    Device tensors use their kind's backend, host tensors gloo, which offload needs beside another. A group already
    joined in this torchrun process, by the user or by ``phalanx.build``, is used and kept.

    ``named``: the plan's kind of device.

    Raises:
        RunError: if that group has other ranks.
    """
    if place.world_size == 1 and not place.group:
        yield
        return
    kind = kind_of(device, named)
    kind.use(device)
    if place.store == "env://":
        atexit.unregister(_let_threads_finish)
        atexit.register(_let_threads_finish)
        if dist.is_initialized():
            _refuse_other_ranks(place)
            yield
            return
    if place.world_size == 1:
        yield
        return
    # torch begins to count its keys anew with each default group, and would find those of an earlier one
    store = PrefixStore(f"phalanx/group/{next(_joins)}{place.group}", meet(place))
    store.set_timeout(place.patience)
    dist.init_process_group(
        kind.backends, store=store, rank=place.rank, world_size=place.world_size, timeout=place.patience
    )
    keep(dist.group.WORLD)
    yield
    # only after a good end: NCCL would wait here for peers that may be gone, and after an error the process ends anyway
    dist.destroy_process_group()


def keep(group: object) -> None:
    """Keep ``group`` alive as long as the process.

    The destructor of a gloo group holds the interpreter's lock and joins gloo's thread, which may need that lock to
    release a tensor. torch then deadlocks, for example if DistributedDataParallel's reducer is the last owner.
    """
    _left.append(group)


def group_timeout() -> timedelta:
    """Return the timeout of collectives in the default process group, which other groups use, too.

    ``dist.new_group`` and ``DeviceMesh`` would use torch's own default, 30 minutes.
    """
    group = dist.distributed_c10d._get_default_group()
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return options._timeout if options is not None else timedelta(seconds=TIMEOUT)


def share_timeout() -> None:
    """Give every group of this process the default group's timeout, including those made by torch."""
    if active() and dist.get_backend() != "fake":
        change = (
            getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        )  # public from torch 2.14 on
        for group in list(dist.distributed_c10d._world.pg_map):
            change(group_timeout(), group)


def _refuse_other_ranks(place: Place) -> None:
    there = dist.get_world_size()
    if there == place.world_size:
        return
    raise RunError(
        f"this process has joined a group of {there} ranks, and the plan needs one of {place.world_size}: where "
        "replicas step by themselves (sync=local, sync=diloco) each replica is a group of its own\n"
        "    try: torch.distributed.destroy_process_group() before it, or plans of one kind in one process"
    )


def _let_threads_finish() -> None:
    """Wait until gloo's threads have released the last collective's tensors, before the interpreter ends.

    Releasing takes the interpreter's lock. Python ends a thread that still waits for the lock in the middle of C++
    code, which aborts the process, and a successful run would be reported as failed. Forked workers leave by
    ``os._exit`` and do not need this.
    """
    time.sleep(0.1)


# torch 2.13 renamed these two and warns at the old names, which 2.11 and 2.12 have alone.
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_scatter_sum(out: torch.Tensor, flat: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to sum ``flat`` (ranks × out.numel()) over the group; this rank's part goes to ``out``."""
    return _reduce_scatter(out, flat, op=dist.ReduceOp.SUM, group=group, async_op=True)


def all_gather_flat(out: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill ``out`` (ranks × part.numel()) with every rank's ``part``, in rank order."""
    _all_gather(out, part, group=group)


def active() -> bool:
    """Return True if there are other workers to talk to."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def sum_over_ranks(values: torch.Tensor) -> None:
    """Sum ``values`` over all workers, in place."""
    if active():
        dist.all_reduce(values)


def from_every_rank(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return a small JSON-like value from each worker, or each rank of ``group``; tuples become lists.

    Raises:
        TypeError: if it is not JSON; names the place.
    """
    return gather_json(value, group) if active() else [as_json(value)]


def alike(value: Any) -> bool:
    """Return True if every worker gives the same JSON-like value. Collective; sends two numbers."""
    return not active() or alike_everywhere(value)


def found_by_first(find: Callable[[], Any]) -> Any:
    """Return rank 0's result of ``find`` as JSON, or raise its error, on every rank. Collective.

    Use it for slow searches with equal results: processes that share cores would otherwise all search.
    """
    if not active():
        return as_json(find())
    if dist.get_rank():
        outcome = broadcast_json(None)
        if "error" in outcome:
            raise error_from_dict(outcome["error"])
        return outcome["found"]
    try:
        found = as_json(find())
    except Exception as error:
        broadcast_json({"error": error_to_dict(error)})
        raise
    return broadcast_json({"found": found})["found"]


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Return True if ``tensor`` is a DTensor, without importing DTensor's module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of ``tensor``."""
    return tensor.to_local() if is_dtensor(tensor) else tensor
