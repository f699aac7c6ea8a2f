"""Error feedback: a codec's losses in a bucket's gradients are added to the next, so that they arrive late, not
never.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.parallel.compression.codecs import Codec, message, pieces, read
from phalanx.parallel.compression.exchange import Wire


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedBucket:
    """Gradients averaged together."""

    names: tuple[str, ...]  # of their parameters, in the order in which they lie in flat
    shapes: tuple[torch.Size, ...]
    flat: Tensor  # all of them, fp32: (count,)


class GradientAverage(ABC):
    """A way to average buckets over ranks."""

    @abstractmethod
    def __call__(self, bucket: CompressedBucket) -> None:
        """Put the mean over the ranks into ``bucket.flat``, in place, with equal bits on all. Collective."""

    @abstractmethod
    def scale(self, factor: float) -> None:
        """Multiply kept values by ``factor``, after a change of the loss scale."""

    @abstractmethod
    def stored(self) -> list[Tensor]:
        """Return the tensors it keeps from step to step."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the kept tensors, equal on every rank, to be saved or filled in place. Collective."""


def lack(whole: Tensor, sent: Tensor, left_out: Tensor) -> None:
    """Put ``whole`` less ``sent`` into ``left_out``, except non-finite numbers; all (count,). Overwrites ``whole``."""
    for piece in pieces(whole):
        lacking = whole[piece].sub_(sent[piece])
        if lacking.device.type == "cpu" and math.isfinite(float(lacking.sum())):
            left_out[piece] = lacking  # to look at each element takes a CPU ten times as long
        else:
            torch.where(lacking.isfinite(), lacking, left_out[piece], out=left_out[piece])


class Feedback:
    """An encoder that adds the losses of earlier messages to each tensor.

    The sum of all messages is the sum of all tensors, except for the last losses. Elements decoded as non-finite (the
    gradient of a skipped step) do not change the kept losses.

    Source: Seide et al., "1-bit stochastic gradient descent", 2014, section 3.2; Karimireddy et al., "Error feedback
    fixes SignSGD and other gradient compression schemes", 2019, algorithm 2.
    """

    def __init__(self, codec: Codec, left_out: Tensor | None = None) -> None:
        """Begin with the losses ``left_out``, in the shape of the tensors to encode."""
        self.codec, self.left_out = codec, left_out

    def message(self, flat: Tensor) -> Tensor:
        """Encode ``flat`` (count,) plus earlier losses. ``flat`` is not changed."""
        whole = self.whole(flat)
        found, sent = message(self.codec, whole), torch.empty_like(whole)
        read(self.codec, found, sent)
        self.keep(whole, sent)
        return found

    def whole(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """Return ``flat`` plus earlier losses, in a new tensor or in ``out``."""
        if self.left_out is None:
            self.left_out = torch.zeros_like(flat, dtype=torch.float32)
        return torch.add(flat, self.left_out, out=out)

    def keep(self, whole: Tensor, sent: Tensor) -> None:
        """Keep the difference of ``whole`` and ``sent`` for the next message. Overwrites ``whole``."""
        assert self.left_out is not None
        lack(whole, sent, self.left_out)


class LeftOut:
    """Losses for each of ``parameters``, fp32, first zeros. torch assigns parameters to new buckets after the
    first step.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._each = {
            name: torch.zeros_like(tensor, dtype=torch.float32, memory_format=torch.contiguous_format)
            for name, tensor in parameters.items()
        }
        self._flats: dict[tuple[str, ...], Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        """Return the losses of one parameter in its shape, to be changed in place."""
        return self._each[name]

    def of(self, bucket: CompressedBucket) -> Tensor:
        """Return the losses of ``bucket.flat``: (count,), to be changed in place."""
        found = self._flats.get(bucket.names)
        if found is None:
            found = torch.cat([self._each[name].reshape(-1) for name in bucket.names])
            moved = set(bucket.names)
            self._flats = {names: flat for names, flat in self._flats.items() if moved.isdisjoint(names)}
            self._flats[bucket.names] = found
            pieces = found.split([shape.numel() for shape in bucket.shapes])
            for name, shape, piece in zip(bucket.names, bucket.shapes, pieces, strict=True):
                self._each[name] = piece.view(shape)
        return found

    def scale(self, factor: float) -> None:
        for tensor in self._each.values():
            tensor.mul_(factor)

    def stored(self) -> list[Tensor]:
        return list(self._each.values())

    def shared(self, wire: Wire) -> dict[str, Tensor]:
        """Replace each rank's losses by their mean over the ranks, and return them by name. Collective.

        Only their sum over the ranks matters, and it is unchanged.
        """
        before = wire.traffic.sent
        for tensor in self._each.values():
            wire.all_reduce(tensor.view(-1))
            tensor.div_(wire.size)
        wire.traffic.kept += wire.traffic.sent - before
        wire.traffic.sent = before
        return dict(self._each)
