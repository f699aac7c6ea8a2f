"""Where a worker stands among all workers, and how it joins and leaves them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One worker's place.

    Attributes:
        rank: among all workers, 0 is the first.
        world_size: workers of the run.
        local_rank: among the workers of this machine; picks the CUDA device.
        local_world_size: workers on this machine; 0 where all of the run's are here.
        store: the key-value store the workers meet at: ``tcp://host:port`` of one already served, or ``env://``
            where a launcher such as torchrun serves it.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 0
    store: str = ""

    @property
    def workers_here(self) -> int:
        """How many of the run's workers share this machine's devices."""
        return self.local_world_size or self.world_size


_left: list[object] = []


def device_for(place: Place, device: str) -> torch.device:
    """The device of this worker: its CUDA device by local rank where ``device`` is ``cuda``, else the CPU."""
    return torch.device("cuda", place.local_rank) if device == "cuda" else torch.device("cpu")


@contextmanager
def joined(place: Place, device: torch.device, *, timeout: timedelta = timedelta(minutes=10)) -> Iterator[None]:
    """The default process group for the length of the block; nothing for a world of one.

    CUDA tensors go by NCCL, CPU tensors by gloo; both are there on a CUDA machine, which offload needs.
    """
    if place.world_size == 1:
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if place.store == "env://":
        dist.init_process_group(backend, timeout=timeout)
    else:
        host, _, port = place.store.removeprefix("tcp://").rpartition(":")
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)
    # torch deadlocks where the last owner of a gloo group is DistributedDataParallel's reducer: its destructor holds
    # the interpreter's lock and joins gloo's thread, which may be waiting for that lock to let go of a tensor.
    _left.append(dist.group.WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()
