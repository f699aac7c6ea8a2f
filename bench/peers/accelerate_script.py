"""The same with Hugging Face Accelerate.

Usage: accelerate_script.py WORKLOAD STEPS, alone or under torchrun. Not under ``accelerate launch``: on CPU it runs
one process whatever number is asked for.
"""

from __future__ import annotations

import sys
from itertools import chain, islice, repeat

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from torch.utils.data import DataLoader

from stopwatch import Stopwatch
from workloads import WORKLOADS, as_it_is, loss


def main(name: str, steps: int) -> None:
    ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ddp])
    set_seed(0)
    workload, watch = WORKLOADS[name], Stopwatch()
    model = workload.model()
    optimizer = workload.optimizer(model.parameters())
    batch = workload.batch // accelerator.num_processes
    loader = DataLoader(workload.data(), batch_size=batch, shuffle=True, collate_fn=as_it_is)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for inputs, target in islice(chain.from_iterable(repeat(loader)), steps):
        watch.begin()
        optimizer.zero_grad()
        value = loss(model(inputs), target)
        accelerator.backward(value)
        optimizer.step()
        value.item()
        watch.done()
    if accelerator.is_main_process:
        watch.report()
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
