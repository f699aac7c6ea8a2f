"""A hand-written DDP script that saves and resumes, for torchrun. Usage: resumed_ddp.py WORKLOAD STEPS EVERY."""

from __future__ import annotations

import os
import sys
import time
from itertools import chain, islice, repeat
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from restart import SCRATCH, strike
from workloads import WORKLOADS, as_it_is, loss


def main(name: str, steps: int, every: int) -> None:
    """Train; the file ``steps`` of the scratch folder has the time at which each step of rank 0 ended."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    workload, scratch = WORKLOADS[name], Path(os.environ[SCRATCH])
    model = DistributedDataParallel(
        workload.model(), gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False
    )
    optimizer, first = workload.optimizer(model.parameters()), 0
    if (saved := scratch / "saved.pt").exists():
        state = torch.load(saved, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    data = workload.data()
    batch = workload.batch // dist.get_world_size()
    loader = DataLoader(data, batch_size=batch, sampler=DistributedSampler(data), collate_fn=as_it_is)
    for step, (inputs, target) in enumerate(islice(chain.from_iterable(repeat(loader)), first, steps), first):
        strike(step)
        optimizer.zero_grad()
        value = loss(model(inputs), target)
        value.backward()
        optimizer.step()
        value.item()
        if dist.get_rank() == 0:
            with (scratch / "steps").open("a") as ends:
                ends.write(f"{time.time()!r}\n")
            if (step + 1) % every == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(state, scratch / "partial.pt")
                (scratch / "partial.pt").replace(saved)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
