"""The same with Lightning Fabric. Usage: fabric_script.py WORKLOAD STEPS PROCESSES; Fabric starts the processes."""

from __future__ import annotations

import logging
import sys
import warnings
from itertools import chain, islice, repeat

from lightning_fabric import Fabric, seed_everything
from lightning_fabric.strategies import DDPStrategy
from torch.utils.data import DataLoader

from stopwatch import Stopwatch
from workloads import WORKLOADS, as_it_is, loss

warnings.filterwarnings("ignore")
logging.getLogger("lightning_fabric").setLevel(logging.ERROR)


def main(name: str, steps: int, processes: int) -> None:
    ddp = DDPStrategy(gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False)
    fabric = Fabric(accelerator="cpu", devices=processes, strategy=ddp if processes > 1 else "auto")
    fabric.launch()
    seed_everything(0, verbose=False)
    workload, watch = WORKLOADS[name], Stopwatch()
    model = workload.model()
    model, optimizer = fabric.setup(model, workload.optimizer(model.parameters()))
    loader = fabric.setup_dataloaders(
        DataLoader(workload.data(), batch_size=workload.batch // processes, shuffle=True, collate_fn=as_it_is)
    )
    for inputs, target in islice(chain.from_iterable(repeat(loader)), steps):
        watch.begin()
        optimizer.zero_grad()
        value = loss(model(inputs), target)
        fabric.backward(value)
        optimizer.step()
        value.item()
        watch.done()
    if fabric.is_global_zero:
        watch.report()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
