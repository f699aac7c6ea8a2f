"""Ways to keep replicas together that send less than DDP, on torch's own parts, for torchrun.

Usage: torchrun --nproc-per-node 2 together.py WORKLOAD STEPS WAY EVERY AFTER. WAY is a communication hook of DDP
(``fp16``, ``powersgd:RANK``), ``local`` (post-local SGD: torch's hook, averager and optimizer) or ``diloco``, which is
written by hand, as torch has none: one flat all-reduce of what replicas have learnt, outer SGD with Nesterov momentum.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import chain, islice, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, DistributedSampler

from stopwatch import Stopwatch
from workloads import WORKLOADS, as_it_is, loss

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9


class DiLoCo:
    """Brings replicas together every so many steps."""

    def __init__(self, model: nn.Module, every: int) -> None:
        self._parameters, self._every, self._steps = list(model.parameters()), every, 0
        self._anchor = nn.Parameter(parameters_to_vector(self._parameters).detach().clone())
        self._outer = torch.optim.SGD([self._anchor], lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)

    def stepped(self) -> None:
        """To be called after each step of the inner optimizer."""
        self._steps += 1
        if self._steps % self._every:
            return
        with torch.no_grad():
            learnt = self._anchor - parameters_to_vector(self._parameters)
            dist.all_reduce(learnt.div_(dist.get_world_size()))
            self._anchor.grad = learnt
            self._outer.step()
            vector_to_parameters(self._anchor.detach(), self._parameters)


def prepared(
    net: nn.Module, optimizer: torch.optim.Optimizer, way: str, every: int, after: int
) -> tuple[nn.Module, Any, Callable[[], None]]:
    """The model to call, the optimizer to step, and what follows a step."""
    if way == "diloco":
        return net, optimizer, DiLoCo(net, every).stepped
    # The hook's callbacks of several buckets run in any order under gloo, and their messages meet: one bucket for it.
    bucket = 10_000 if way.startswith("powersgd") else None
    model = DistributedDataParallel(net, gradient_as_bucket_view=True, broadcast_buffers=False, bucket_cap_mb=bucket)
    if way == "local":
        state = PostLocalSGDState(
            process_group=None, subgroup=None, start_localSGD_iter=after, post_local_gradient_allreduce=False
        )
        model.register_comm_hook(state, post_localSGD_hook)
        averager = PeriodicModelAverager(period=every, warmup_steps=after)
        return model, PostLocalSGDOptimizer(optimizer, averager), lambda: None
    if way == "fp16":
        model.register_comm_hook(None, fp16_compress_hook)
    else:
        rank = int(way.removeprefix("powersgd:"))
        hooked = PowerSGDState(process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        model.register_comm_hook(hooked, powerSGD_hook)
    return model, optimizer, lambda: None


def main(name: str, steps: int, way: str, every: int, after: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    workload, watch = WORKLOADS[name], Stopwatch()
    net = workload.model()
    model, optimizer, after_step = prepared(net, workload.optimizer(net.parameters()), way, every, after)
    data = workload.data()
    batch = workload.batch // dist.get_world_size()
    loader = DataLoader(data, batch_size=batch, sampler=DistributedSampler(data), collate_fn=as_it_is)
    last = 0.0
    for inputs, target in islice(chain.from_iterable(repeat(loader)), steps):
        watch.begin()
        optimizer.zero_grad()
        value = loss(model(inputs), target)
        value.backward()
        optimizer.step()
        after_step()
        last = value.item()
        watch.done()
    if dist.get_rank() == 0:
        watch.report(loss=last)
    dist.barrier()
    os._exit(0)  # a hook's own thread may be the last to hold the group, and to end it from there aborts


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
