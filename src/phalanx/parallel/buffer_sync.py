"""Running statistics of normalisation layers, kept equal on every rank after each step.

Every rank sees other samples, so that running means drift apart. Rank 0's are sent to all. torch's
DistributedDataParallel does this before a forward; here it follows a step's last forward, so that evaluation and
checkpoints see them, too.
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
    """Return names of the buffers with ``layer``'s own running statistics; empty if it has none.

    A layer of another library declares these names as ``running_statistics`` on its class, or on itself if they differ.
    """
    if isinstance(layer, _NormBase):
        return ("running_mean", "running_var") if layer.track_running_stats else ()
    own: tuple[str, ...] = getattr(type(layer), "running_statistics", ())
    return vars(layer).get("running_statistics", own) if own else ()


def running_statistics(module: nn.Module) -> dict[str, torch.Tensor]:
    """Map name to running mean or variance of each normalisation layer: values equal on every rank after a step."""
    return {
        f"{prefix}.{name}".lstrip("."): buffer
        for prefix, layer in module.named_modules()
        for name in statistics_of(layer)
        if isinstance(buffer := getattr(layer, name), torch.Tensor) and not buffer.is_meta
    }


class BufferSync:
    """The running means and variances in a model; without any, sharing does nothing.

    ``group`` are the ranks that share them, by default all. ``alone``: no other rank has them.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None, *, alone: bool = False) -> None:
        self._group, self._alone = group, alone
        self._layers = [(child, names) for child in module.modules() if (names := statistics_of(child))]

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Return the running means and variances."""
        # Looked up each time: moving a module to a device puts other tensors in place of its buffers.
        return [
            buffer
            for layer, names in self._layers
            for name in names
            if isinstance(buffer := getattr(layer, name), torch.Tensor)
        ]

    def share(self) -> None:
        """Give every rank the statistics of the first rank, in one broadcast. Collective."""
        buffers = self.buffers
        if not buffers or self._alone or not active():
            return
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        dist.broadcast(flat, group=self._group, group_src=0)
        spread(buffers, flat)


@contextmanager
def statistics_kept(module: nn.Module) -> Generator[None]:
    """Restore running statistics and batch counts after a forward that is computed again."""
    buffers = [buffer for layer in module.modules() if statistics_of(layer) for buffer in layer.buffers(recurse=False)]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, values in zip(buffers, before, strict=True):
            buffer.data.copy_(values)  # which autograd, that has saved them, does not look at


@contextmanager
def buffers_kept(module: nn.Module) -> Generator[None]:
    """Restore the buffers of ``module`` after a forward that is only a trial."""
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
