"""The hook by which DistributedDataParallel's buckets are averaged in another way than by all-reducing them whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from phalanx.config.sync import Compression
from phalanx.parallel.compress.bucket import Average, Bucket
from phalanx.parallel.compress.choice import codec
from phalanx.parallel.compress.coded import Coded
from phalanx.parallel.compress.lane import lane
from phalanx.parallel.compress.powersgd import PowerSGD
from phalanx.parallel.compress.wire import Traffic, Wire


class Sender:
    """Averages gradients over the ranks of a group, made smaller, while backward goes on.

    Attributes:
        traffic: what this rank has sent.
        kind: of the sending: what one keeps from step to step is no use to another kind.
    """

    def __init__(self, compress: str, group: dist.ProcessGroup, parameters: Mapping[str, Tensor]) -> None:
        """``compress`` as plans have it; ``group`` is nobody else's; ``parameters`` are those that learn, by name."""
        self.traffic, self.kind = Traffic(), f"compress={compress} over {group.size()} ranks"
        self._names = {id(tensor): name for name, tensor in parameters.items()}
        self._wire = Wire(group, self.traffic)
        self._average = _average(compress, self._wire, parameters)
        self._lane = lane(next(iter(parameters.values())).device)

    def send(self, bucket: Any) -> Future[Tensor]:
        """What torch's communication hook is to give for a ``GradBucket``: its buffer, averaged over the ranks."""
        found = bucket.parameters()
        names, shapes = tuple(self._names[id(tensor)] for tensor in found), tuple(tensor.shape for tensor in found)
        buffer = bucket.buffer()
        return self._lane.start(lambda: self._averaged(names, shapes, buffer))

    def scale(self, factor: float) -> None:
        """Gradients are ``factor`` times as large from now on: so is what was left out of those before."""
        if factor != 1.0:
            self._average.scale(factor)

    def stored(self) -> list[Tensor]:
        """What is kept in memory from step to step."""
        return self._average.stored()

    def tensors(self) -> dict[str, Tensor]:
        """What is handed on from step to step, the same on every rank; to be saved, or filled in place. Collective."""
        return self._average.tensors()

    @torch.no_grad()
    def _averaged(self, names: tuple[str, ...], shapes: tuple[torch.Size, ...], buffer: Tensor) -> Tensor:
        flat = buffer.float()
        self._average(Bucket(names=names, shapes=shapes, flat=flat))
        if flat is not buffer:
            buffer.copy_(flat)
        return buffer


def _average(compress: str, wire: Wire, parameters: Mapping[str, Tensor]) -> Average:
    asked = Compression.parse(compress)
    if asked.codec == "powersgd":
        return PowerSGD(int(asked.amount), wire, parameters)
    chosen = codec(compress)
    assert chosen is not None
    return Coded(chosen, wire, parameters)
