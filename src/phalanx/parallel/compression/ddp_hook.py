"""The communication hook that averages DistributedDataParallel's buckets through a codec, with equal bits on
every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from phalanx.config.sync import Compression
from phalanx.parallel.compression.codecs import Codec, codec, message, read, write
from phalanx.parallel.compression.error_feedback import CompressedBucket, Feedback, GradientAverage, LeftOut
from phalanx.parallel.compression.exchange import CompressedTraffic, Wire, lane
from phalanx.parallel.compression.powersgd import PowerSGD

_MANY = 16
"""Grains in a chunk from which on it is made of whole ones: then what is added to its end does not matter."""


def averaged(flat: Tensor, wire: Wire, codec: Codec, feedback: Feedback | None = None) -> None:
    """Put the mean over the ranks of ``wire`` into ``flat`` (count,), fp32, in place. Collective.

    ``feedback``, for this rank and tensor, adds the codec's losses to the next call. Every rank reads the same messages
    in the same order, so that all end with the same bits.
    """
    if wire.size == 1 or not flat.numel():
        return
    wire.traffic.count_uncompressed(flat.numel(), wire.size)
    (_gathered if codec.facts.way == "gathered" else _in_two)(flat, wire, codec, feedback)


def _gathered(flat: Tensor, wire: Wire, codec: Codec, feedback: Feedback | None) -> None:
    """Send each rank's message to all ranks: needed if messages hold different indices, whose sum is larger."""
    sent = feedback.message(flat) if feedback else message(codec, flat)
    for rank, one in enumerate(wire.all_gather(sent)):
        read(codec, one, flat, add=rank > 0)
    flat.div_(wire.size)


def _in_two(flat: Tensor, wire: Wire, codec: Codec, feedback: Feedback | None) -> None:
    """Add up one chunk of all tensors in fp32 on each rank, and send its mean to all, encoded again.

    This sends as much as a ring, and rounds each number twice at most for any number of ranks. The second rounding's
    error is kept by its rank, multiplied by the number of ranks, since that rank's next part is divided by it.

    Source: Tang et al., "1-bit Adam", 2021, section 3.1 (compressed all-reduce).
    """
    count, size = flat.numel(), wire.size
    grain = codec.facts.grain if count > _MANY * size * codec.facts.grain else 1
    chunk = -(-count // (size * grain)) * grain
    rows = flat.new_empty(size, chunk)
    whole, rest = rows.view(-1)[:count], rows.view(-1)[count:]
    rest.zero_()
    if feedback:
        feedback.whole(flat, out=whole)
    else:
        whole.copy_(flat)
    outgoing = flat.new_empty(size, codec.bytes_of(chunk), dtype=torch.uint8)
    for row, one in zip(rows, outgoing, strict=True):
        write(codec, row, one)
    mean = flat.new_zeros(chunk)
    for one in wire.all_to_all(outgoing):
        read(codec, one, mean, add=True)
    mean.div_(size)
    again = message(codec, mean)
    if feedback:
        sent = torch.empty_like(rows)
        for row, one in zip(sent, outgoing, strict=True):
            read(codec, one, row)
        rounded = torch.empty_like(mean)
        read(codec, again, rounded)
        sent[wire.rank].sub_(mean.sub_(rounded), alpha=size)
        feedback.keep(whole, sent.view(-1)[:count])
    for one, place in zip(wire.all_gather(again), flat.split(chunk), strict=False):
        if place.numel() == chunk:
            read(codec, one, place)
        else:
            read(codec, one, mean)
            place.copy_(mean[: place.numel()])


class Coded(GradientAverage):
    """The mean of compressed gradients, with error feedback if the codec needs it."""

    def __init__(self, codec: Codec, wire: Wire, parameters: Mapping[str, Tensor]) -> None:
        self._codec, self._wire = codec, wire
        self._left_out = LeftOut(parameters) if codec.facts.feeds_back else None

    def __call__(self, bucket: CompressedBucket) -> None:
        feedback = Feedback(self._codec, self._left_out.of(bucket)) if self._left_out else None
        averaged(bucket.flat, self._wire, self._codec, feedback)

    def scale(self, factor: float) -> None:
        if self._left_out:
            self._left_out.scale(factor)

    def stored(self) -> list[Tensor]:
        return self._left_out.stored() if self._left_out else []

    def tensors(self) -> dict[str, Tensor]:
        if not self._left_out:
            return {}
        return {f"left_out.{name}": tensor for name, tensor in self._left_out.shared(self._wire).items()}


class Sender:
    """A sender that compresses gradients and averages them over a group during backward."""

    def __init__(self, compress: str, group: dist.ProcessGroup, parameters: Mapping[str, Tensor]) -> None:
        """Take ``compress`` of a plan, a ``group`` used only here, and the trainable ``parameters`` by name."""
        self.traffic = CompressedTraffic()  # bytes sent by this rank
        # What one keeps from step to step is no use to another kind.
        self.kind = f"compress={compress} over {group.size()} ranks"
        self._names = {id(tensor): name for name, tensor in parameters.items()}
        self._wire = Wire(group, self.traffic)
        self._average = _average(compress, self._wire, parameters)
        self._lane = lane(next(iter(parameters.values())).device)

    def send(self, bucket: Any) -> Future[Tensor]:
        """Average a ``GradBucket``'s buffer over the ranks, as torch's communication hook."""
        found = bucket.parameters()
        names, shapes = tuple(self._names[id(tensor)] for tensor in found), tuple(tensor.shape for tensor in found)
        buffer = bucket.buffer()
        return self._lane.start(lambda: self._averaged(names, shapes, buffer))

    def scale(self, factor: float) -> None:
        """Multiply kept losses by ``factor``, after a change of the loss scale."""
        if factor != 1.0:
            self._average.scale(factor)

    def stored(self) -> list[Tensor]:
        return self._average.stored()

    def tensors(self) -> dict[str, Tensor]:
        return self._average.tensors()

    @torch.no_grad()
    def _averaged(self, names: tuple[str, ...], shapes: tuple[torch.Size, ...], buffer: Tensor) -> Tensor:
        flat = buffer.float()
        self._average(CompressedBucket(names=names, shapes=shapes, flat=flat))
        if flat is not buffer:
            buffer.copy_(flat)
        return buffer


def _average(compress: str, wire: Wire, parameters: Mapping[str, Tensor]) -> GradientAverage:
    asked = Compression.parse(compress)
    if asked.codec == "powersgd":
        return PowerSGD(int(asked.amount), wire, parameters)
    chosen = codec(compress)
    assert chosen is not None
    return Coded(chosen, wire, parameters)
