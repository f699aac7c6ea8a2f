"""LARS and LAMB on sharded parameters take the steps that they take on whole ones."""

import os
import traceback
import warnings
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from phalanx.comm.process_group import Place, default_process_group
from phalanx.train.optimizers import LAMB, LARS

# 2 rows on 3 ranks leave one rank without any; 5 and 7 rows divide over neither 2 nor 3.
SHAPES = [(5, 4), (2, 3), (7,), (4, 2, 3), (1,)]
STEPS = 4
OPTIMIZERS = {
    "lars": lambda groups: LARS(groups, lr=0.5, weight_decay=0.01, trust_coefficient=0.1),
    "lars-nesterov": lambda groups: LARS(groups, lr=0.5, nesterov=True, lr_in_velocity=True, exclude_1d=False),
    "lamb": lambda groups: LAMB(groups, lr=0.05, weight_decay=0.1),
    "lamb-clipped": lambda groups: LAMB(groups, lr=0.05, trust_clip=(0.5, 2.0), exclude_1d=False),
}


def everywhere(world_size, target):
    """Runs ``target`` in ``world_size`` forked ranks; fails with the tracebacks of those that fail."""
    children = [_start(rank, world_size, target) for rank in range(world_size)]
    # Only now: a fork while the store's thread holds a lock of libc leaves that lock held in the child for ever.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for child in children:
        os.write(child.address, f"tcp://127.0.0.1:{store.port}".encode())
        os.close(child.address)
    failures = []
    for rank, child in enumerate(children):
        with os.fdopen(child.said) as pipe:
            text = pipe.read()
        if os.waitpid(child.pid, 0)[1] != 0:
            failures.append(f"rank {rank}:\n{text}")
    assert not failures, "\n".join(failures)


class Child(NamedTuple):
    pid: int
    address: int
    said: int


def _start(rank, world_size, target):
    address_out, address_in = os.pipe()
    said_out, said_in = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 and later warn of fork beside any thread
        pid = os.fork()
    if pid:
        os.close(address_out)
        os.close(said_in)
        return Child(pid, address_in, said_out)
    code = 1
    try:
        torch.set_num_threads(1)
        os.close(address_in)
        place = Place(
            rank=rank, world_size=world_size, local_rank=rank, store=os.read(address_out, 100).decode(), timeout=30.0
        )
        with default_process_group(place, torch.device("cpu")):
            target(place)
        code = 0
    except BaseException:
        os.write(said_in, traceback.format_exc().encode())
    finally:
        os._exit(code)


def values(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def stepped(name, parameters, place_gradient):
    """The parameters after a few steps, in two groups, with gradients that depend on the step alone."""
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.2}]
    optimizer = OPTIMIZERS[name](groups)
    for step in range(STEPS):
        for parameter, gradient in zip(parameters, values(100 + step), strict=True):
            parameter.grad = place_gradient(gradient)
        optimizer.step()
    return optimizer


def plain(name):
    parameters = [nn.Parameter(value) for value in values(0)]
    stepped(name, parameters, lambda gradient: gradient)
    return [parameter.detach() for parameter in parameters]


def check_against_plain(name, mesh, placements):
    def place(value):
        return distribute_tensor(value, mesh, placements)

    calls = []
    original = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    parameters = [nn.Parameter(place(value)) for value in values(0)]
    optimizer = stepped(name, parameters, place)
    dist.all_reduce = original
    assert len(calls) == (STEPS if any(placement.is_shard() for placement in placements) else 0)
    for parameter, expected in zip(parameters, plain(name), strict=True):
        assert isinstance(parameter, DTensor)
        torch.testing.assert_close(parameter.full_tensor(), expected, rtol=2e-6, atol=1e-7)
        for key, value in optimizer.state[parameter].items():
            if key == "step":
                assert value.item() == STEPS
            else:
                assert isinstance(value, DTensor)
                assert value.placements == parameter.placements
                assert value.shape == parameter.shape


@pytest.mark.parametrize("world_size", [2, 3])
def test_sharded_and_replicated_equal_plain(world_size):
    def target(place):
        mesh = init_device_mesh("cpu", (world_size,))
        for name in OPTIMIZERS:
            check_against_plain(name, mesh, (Shard(0),))
            check_against_plain(name, mesh, (Replicate(),))

    everywhere(world_size, target)


def test_hybrid_mesh_equals_plain():
    def target(place):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))
        for name in OPTIMIZERS:
            check_against_plain(name, mesh, (Replicate(), Shard(0)))

    everywhere(4, target)


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_fully_shard_equals_one_process(name):
    def train(model, x):
        optimizer = OPTIMIZERS[name](list(model.parameters()))
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return model

    def made():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))

    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))

    def target(place):
        expected = dict(train(made(), x).named_parameters())
        sharded = train(fully_shard(made(), mesh=init_device_mesh("cpu", (place.world_size,))), x)
        for key, parameter in sharded.named_parameters():
            torch.testing.assert_close(parameter.full_tensor(), expected[key].detach(), rtol=2e-6, atol=1e-7)

    everywhere(2, target)


def test_local_norms_alone_would_differ():
    """The harness can tell: with the all-reduce taken away the sharded steps are other steps."""

    def target(place):
        mesh = init_device_mesh("cpu", (2,))
        original, dist.all_reduce = dist.all_reduce, lambda *args, **kwargs: None
        parameters = [nn.Parameter(distribute_tensor(value, mesh, (Shard(0),))) for value in values(0)]
        stepped("lamb", parameters, lambda gradient: distribute_tensor(gradient, mesh, (Shard(0),)))
        dist.all_reduce = original
        assert not torch.allclose(parameters[0].full_tensor(), plain("lamb")[0], rtol=1e-3)

    everywhere(2, target)
