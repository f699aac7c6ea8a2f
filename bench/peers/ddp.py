"""A hand-written DDP script, for torchrun. Usage: torchrun --nproc-per-node 2 ddp.py WORKLOAD STEPS."""

from __future__ import annotations

import sys
from itertools import chain, islice, repeat

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from stopwatch import Stopwatch
from workloads import WORKLOADS, as_it_is, loss


def main(name: str, steps: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    workload, watch = WORKLOADS[name], Stopwatch()
    model = DistributedDataParallel(
        workload.model(), gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False
    )
    optimizer = workload.optimizer(model.parameters())
    data = workload.data()
    batch = workload.batch // dist.get_world_size()
    loader = DataLoader(data, batch_size=batch, sampler=DistributedSampler(data), collate_fn=as_it_is)
    for inputs, target in islice(chain.from_iterable(repeat(loader)), steps):
        watch.begin()
        optimizer.zero_grad()
        value = loss(model(inputs), target)
        value.backward()
        optimizer.step()
        value.item()
        watch.done()
    if dist.get_rank() == 0:
        watch.report()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
