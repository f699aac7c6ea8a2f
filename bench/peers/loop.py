"""The loop everybody writes, for one process. Usage: loop.py WORKLOAD STEPS."""

from __future__ import annotations

import sys
from itertools import chain, islice, repeat

import torch
from torch.utils.data import DataLoader

from stopwatch import Stopwatch
from workloads import WORKLOADS, as_it_is, loss


def main(name: str, steps: int) -> None:
    torch.manual_seed(0)
    workload, watch = WORKLOADS[name], Stopwatch()
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    loader = DataLoader(workload.data(), batch_size=workload.batch, shuffle=True, collate_fn=as_it_is)
    for inputs, target in islice(chain.from_iterable(repeat(loader)), steps):
        watch.begin()
        optimizer.zero_grad()
        value = loss(model(inputs), target)
        value.backward()
        optimizer.step()
        value.item()
        watch.done()
    watch.report()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
