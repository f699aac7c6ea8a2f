"""Running statistics of normalisation layers, the same on every rank after each step.

Every rank sees other samples, so that each one's running means drift apart. Rank 0's go to all, as torch's
DistributedDataParallel does it before a forward; here after a step's last one, so that evaluation and checkpoints see
them too.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from phalanx.comm import active
from phalanx.parallel.grad_reduce import spread


def statistics_of(layer: nn.Module) -> tuple[str, ...]:
    """Names of the buffers in which ``layer`` itself keeps running statistics; empty where it keeps none.

    A layer of another library than torch says so itself: its class has these names as ``running_statistics``; so has
    the layer, where they are others than those of its class.
    """
    if isinstance(layer, _NormBase):
        return ("running_mean", "running_var") if layer.track_running_stats else ()
    own: tuple[str, ...] = getattr(type(layer), "running_statistics", ())
    return vars(layer).get("running_statistics", own) if own else ()


def running_statistics(module: nn.Module) -> dict[str, torch.Tensor]:
    """Name → running mean or variance of each normalisation layer: what is the same on every rank after a step."""
    return {
        f"{prefix}.{name}".lstrip("."): buffer
        for prefix, layer in module.named_modules()
        for name in statistics_of(layer)
        if isinstance(buffer := getattr(layer, name), torch.Tensor) and not buffer.is_meta
    }


class BufferSync:
    """The running means and variances in a model; where it has none, sharing them does nothing.

    ``group`` are the ranks that share them; all where it is not given. With ``alone`` nobody else has them.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None, *, alone: bool = False) -> None:
        self._group, self._alone = group, alone
        self._layers = [(child, names) for child in module.modules() if (names := statistics_of(child))]

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The running means and variances."""
        # Looked up each time: moving a module to a device puts other tensors in place of its buffers.
        return [
            buffer
            for layer, names in self._layers
            for name in names
            if isinstance(buffer := getattr(layer, name), torch.Tensor)
        ]

    def share(self) -> None:
        """Give every rank the statistics of the first, in one broadcast. Collective."""
        buffers = self.buffers
        if not buffers or self._alone or not active():
            return
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        dist.broadcast(flat, group=self._group, group_src=0)
        spread(buffers, flat)


@contextmanager
def statistics_kept(module: nn.Module) -> Generator[None]:
    """Around a forward that is computed again: running statistics, and counts of batches, stay as they are."""
    buffers = [buffer for layer in module.modules() if statistics_of(layer) for buffer in layer.buffers(recurse=False)]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, values in zip(buffers, before, strict=True):
            buffer.data.copy_(values)  # which autograd, that has saved them, does not look at


@contextmanager
def buffers_kept(module: nn.Module) -> Generator[None]:
    """Around a forward that only looks at ``module``: what it writes into buffers is taken back."""
    before = [
        (child, name, buffer.clone())
        for child in module.modules()
        for name, buffer in child.named_buffers(recurse=False)
        if not buffer.is_meta
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for child, name, values in before:
                buffer = child._buffers.get(name)
                if buffer is not None and not buffer.is_meta:
                    buffer.copy_(values)
