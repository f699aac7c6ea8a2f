"""Synchronous data parallelism: every rank holds the whole model and sees its own share of each global batch.

After backward each rank has the gradient of its share; the sum over ranks is the gradient of the global batch. torch's
DistributedDataParallel adds them up bucket by bucket while backward is still computing earlier layers, so that
communication hides behind computation. Every rank then takes the same optimizer step, and the replicas stay equal.

With accumulation only the last micro-batch communicates (``no_sync`` before it). Ranks may hold unequal shares: each
gradient is a sum over samples, not a mean, so no weights are needed, and the one division by the global count follows.

Use it while the model with its gradients and optimizer state fits one device; beyond that see ``shard``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phalanx.comm.mesh import own_group
from phalanx.config import Job
from phalanx.device_kinds import kind_of
from phalanx.parallel.advice import without_gradient
from phalanx.parallel.buffer_sync import BufferSync
from phalanx.parallel.compression import Sender
from phalanx.parallel.layout import Layout, MicroBatchWork, RankHoldings, drop_gradients, each_micro_batch, trainable

# torch 2.13 renamed the option that copies rank 0's buffers (running statistics) to all ranks before each forward.
_known = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _known else "broadcast_buffers"


class DdpLayout(Layout):
    """The whole model on every rank, gradients averaged over all of them by DistributedDataParallel.

    ``compress`` is the plan's way to send them.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, job: Job, world_size: int, compress: str = "none"
    ) -> None:
        self._module = module.to(device)
        self._device = device
        self._ddp = distributed(self._module, device, job)
        self._may_be_unused = job.unused == "allow"
        self._statistics = BufferSync(self._module)
        parameters = trainable(module)
        sender = None if compress == "none" else Sender(compress, own_group(), parameters)
        if sender:
            self._ddp.register_comm_hook(None, lambda _, bucket: sender.send(bucket))
        self.holdings = RankHoldings(
            module=self._module, parameters=parameters, divisor=world_size, whole=True, sender=sender
        )

    def accumulate(self, parts: Sequence[Sequence[Any]], work: MicroBatchWork) -> None:
        accumulate(self._ddp, self._device, parts[0], work)

    def finish(self) -> None:
        if self.holdings.sender:
            self.holdings.sender.traffic.steps += 1
        if not self._may_be_unused:
            check_reduced(self._ddp, self.parameters)
        self._statistics.share()

    def stepped(self) -> None:
        drop_gradients(self.parameters.values())


def distributed(module: nn.Module, device: torch.device, job: Job) -> DistributedDataParallel:
    """Wrap ``module`` in DistributedDataParallel over all ranks, gradients kept in its buckets (no second copy)."""
    buffers: dict[str, Any] = {_SYNC_BUFFERS: False}  # BufferSync does it, after the last backward
    return DistributedDataParallel(
        module,
        device_ids=None if kind_of(device).on_host else [device.index],
        gradient_as_bucket_view=True,
        find_unused_parameters=job.unused == "allow",
        **buffers,
    )


def accumulate(ddp: DistributedDataParallel, device: torch.device, micros: Sequence[Any], work: MicroBatchWork) -> None:
    """Run every micro-batch; only the last one's backward communicates."""
    each_micro_batch(ddp, device, micros, work, around=lambda last: nullcontext() if last else ddp.no_sync())


def check_reduced(ddp: DistributedDataParallel, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise if this rank's last backward left parameters out, for which the other ranks would wait.

    torch itself would raise a less clear error at the next forward.

    Raises:
        GradientError: naming the parameters.
    """
    try:
        ddp._check_reducer_finalized()
    except RuntimeError:
        names = [name for name, tensor in parameters.items() if tensor.grad is None]
        raise without_gradient(names or ["some that an earlier micro-batch of the step used"], "on this rank") from None
