"""Error feedback: what a codec left out of a bucket's gradients is added to the next, so that late is not lost."""

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
    """Gradients that are averaged together."""

    names: tuple[str, ...]  # of their parameters, in the order in which they lie in flat
    shapes: tuple[torch.Size, ...]
    flat: Tensor  # all of them, fp32: (count,)


class GradientAverage(ABC):
    """A way to average buckets over ranks."""

    @abstractmethod
    def __call__(self, bucket: CompressedBucket) -> None:
        """Put the mean over the ranks into ``bucket.flat``, in place: the same bits on every rank. Collective."""

    @abstractmethod
    def scale(self, factor: float) -> None:
        """Gradients are ``factor`` times as large from now on (a loss scale that changes)."""

    @abstractmethod
    def stored(self) -> list[Tensor]:
        """What it keeps in memory from step to step."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """What it hands on from step to step, the same on every rank; to be saved, or filled in place. Collective."""


def lack(whole: Tensor, sent: Tensor, left_out: Tensor) -> None:
    """Put ``whole`` less ``sent`` into ``left_out``, but for what is not finite; all (count,). ``whole`` is used up."""
    for piece in pieces(whole):
        lacking = whole[piece].sub_(sent[piece])
        if lacking.device.type == "cpu" and math.isfinite(float(lacking.sum())):
            left_out[piece] = lacking  # to look at each element takes a CPU ten times as long
        else:
            torch.where(lacking.isfinite(), lacking, left_out[piece], out=left_out[piece])


class Feedback:
    """Encodes one tensor after another, each with what was left out of those before.

    The sum of all that was sent is the sum of all that was given, but for what is left out at the end. Elements that
    come out as no finite number (the gradient of a step that is skipped) change nothing of what is left out of them.

    Source: Seide et al., "1-bit stochastic gradient descent", 2014, section 3.2; Karimireddy et al., "Error feedback
    fixes SignSGD and other gradient compression schemes", 2019, algorithm 2.
    """

    def __init__(self, codec: Codec, left_out: Tensor | None = None) -> None:
        """``left_out``: before the first, of the shape of what is encoded."""
        self.codec, self.left_out = codec, left_out

    def message(self, flat: Tensor) -> Tensor:
        """The message that ``flat`` (count,) and what was left out before become. ``flat`` stays as it is."""
        whole = self.whole(flat)
        found, sent = message(self.codec, whole), torch.empty_like(whole)
        read(self.codec, found, sent)
        self.keep(whole, sent)
        return found

    def whole(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """``flat`` with what was left out before: a tensor of its own, or ``out``."""
        if self.left_out is None:
            self.left_out = torch.zeros_like(flat, dtype=torch.float32)
        return torch.add(flat, self.left_out, out=out)

    def keep(self, whole: Tensor, sent: Tensor) -> None:
        """``sent`` has gone for ``whole``, which is used up: what it lacks is left out until the next."""
        assert self.left_out is not None
        lack(whole, sent, self.left_out)


class LeftOut:
    """fp32 zeros at first, for each of ``parameters``. torch deals them out to buckets anew after the first step."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._each = {
            name: torch.zeros_like(tensor, dtype=torch.float32, memory_format=torch.contiguous_format)
            for name, tensor in parameters.items()
        }
        self._flats: dict[tuple[str, ...], Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        """What was left out of one parameter: its shape, to be changed in place."""
        return self._each[name]

    def of(self, bucket: CompressedBucket) -> Tensor:
        """What belongs to ``bucket.flat``: (count,), to be changed in place."""
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
        """All of it by name, once its mean over the ranks has taken the place of each rank's. Collective.

        The sum over the ranks, which is what counts, stays as it is.
        """
        before = wire.traffic.sent
        for tensor in self._each.values():
            wire.all_reduce(tensor.view(-1))
            tensor.div_(wire.size)
        wire.traffic.kept += wire.traffic.sent - before
        wire.traffic.sent = before
        return dict(self._each)
