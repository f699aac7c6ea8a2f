"""Training loops of a workload: plain PyTorch by hand, and Phalanx, built once and then called for steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx as px
from gpu_record.measure import seconds_of
from gpu_record.workloads import Target

Take = Callable[[int], None]
"""Take so many optimizer steps."""


def plain_steps(
    job: px.Job, target: Target, device: str, *, compiled: bool, half: bool = True, ignored: int | None = None
) -> Take:
    """Return plain PyTorch by hand: compiled blocks and loss, fused AdamW, bf16 autocast, pinned batches.

    The host waits for nothing: batches are pinned beforehand and copied asynchronously, and no loss is read.
    """
    module = job.model().to(device).train()
    optimizer = torch.optim.AdamW(
        [one for one in module.parameters() if one.requires_grad], lr=1e-4, fused=device == "cuda"
    )
    loss_of = _loss(-100 if ignored is None else ignored)
    if compiled:
        blocks = getattr(module, "blocks", None)
        for block in blocks if isinstance(blocks, nn.ModuleList) else [module]:
            block.compile(dynamic=False)
        loss_of = torch.compile(loss_of)
    batches = itertools.cycle(_batches(job, device))

    def take(count: int) -> None:
        for _ in range(count):
            batch = {name: one.to(device, non_blocking=True) for name, one in next(batches).items()}
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device, torch.bfloat16, enabled=half):
                output = module(job.inputs(batch) if job.inputs else batch)
                loss = loss_of(output, target(batch))
            loss.backward()
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return take


def phalanx_steps(job: px.Job, plan: str) -> Take:
    """Return the steps of ``px.build``'s loop under ``plan``."""
    step, loader = px.build(job, px.Plan.parse(plan))
    batches = iter(loader)

    def take(count: int) -> None:
        for _ in range(count):
            step(next(batches))
        step.zero_grad()

    return take


def timed(take: Take, count: int, device: str) -> float:
    """Return seconds of one step of ``count``."""
    return seconds_of(lambda: take(count), 1, device) / count


def _loss(ignored: int) -> Callable[[Tensor, Tensor], Tensor]:
    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.float().flatten(0, -2), target.flatten(), ignore_index=ignored, reduction="mean")

    return loss_of


def _batches(job: px.Job, device: str) -> list[dict[str, Tensor]]:
    columns = job.data().columns
    count = len(next(iter(columns.values()))) // job.batch
    made: list[dict[str, Tensor]] = []
    for index in range(max(1, count)):
        rows = {name: column[index * job.batch : (index + 1) * job.batch] for name, column in columns.items()}
        made.append({name: one.contiguous().pin_memory() if device == "cuda" else one for name, one in rows.items()})
    return made
