"""Forked ranks for the checkpoint tests, and a model in shards."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

import pytest
import torch
import torch._dynamo  # what sharding needs on first use; else every forked rank imports it anew, for seconds
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from phalanx.comm import Place, default_process_group

DEADLINE = 40.0
FORKS_BESIDE_THREADS = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
"""For tests that fork: 3.12 and later warn of every fork in a process that has threads, whoever started them."""


def ranks(world_size: int, target: Callable[[int], None]) -> None:
    """Run ``target(rank)`` in ``world_size`` forked ranks; fails with the tracebacks of those that fail or hang."""
    pipes = [os.pipe() for _ in range(world_size)]
    addresses = [os.pipe() for _ in range(world_size)]
    sys.stdout.flush()
    children = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            _child(rank, world_size, target, addresses[rank][0], pipes[rank][1])
        children.append(pid)
        os.close(pipes[rank][1])
    # The store's thread starts after the forks: a child could inherit a lock that it holds.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for out, into in addresses:
        os.write(into, f"tcp://127.0.0.1:{store.port}".encode())
        os.close(into)
        os.close(out)
    codes = _ended(children)
    texts = []
    for rank, (out, _) in enumerate(pipes):
        with os.fdopen(out) as pipe:
            text = pipe.read()
        if codes[rank]:
            texts.append(f"rank {rank} ended with {codes[rank]}\n{text}")
    assert not texts, "\n".join(texts)


def _child(rank: int, world_size: int, target: Callable[[int], None], address: int, said: int) -> None:
    code = 1
    try:
        torch.set_num_threads(1)
        place = Place(
            rank=rank, world_size=world_size, local_rank=rank, store=os.read(address, 100).decode(), timeout=20.0
        )
        with default_process_group(place, torch.device("cpu")):
            target(rank)
        code = 0
    except BaseException:
        os.write(said, traceback.format_exc()[-4000:].encode())
    finally:
        os._exit(code)


def _ended(children: list[int]) -> list[int]:
    codes: dict[int, int] = {}
    until = time.monotonic() + DEADLINE
    while len(codes) < len(children):
        for pid in children:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > until:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[pid] for pid in children]


def model() -> nn.Module:
    """Five and seven rows divide over neither two, three nor four ranks; one row leaves all but one without any."""
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def sharded() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model in torch's shards over this rank's group, and its parameters by name."""
    module = model()
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return module, dict(module.named_parameters())


def row_view(whole: Tensor, mesh: DeviceMesh | None = None) -> DTensor:
    """This rank's rows of a whole parameter, as ``fully_shard`` would cut them, without a copy."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    rows = -(-len(whole) // mesh.size())
    first = min(mesh.get_local_rank() * rows, len(whole))
    local = whole.detach()[first : first + rows]
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())


def placed(value: Tensor, like: Tensor) -> Tensor:
    """The shards of ``value``, known to every rank, that ``like`` has here; no rank talks to another."""
    if not isinstance(like, DTensor):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a plain or distributed tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The global value of a plain or distributed tensor."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
