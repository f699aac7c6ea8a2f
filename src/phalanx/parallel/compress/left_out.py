"""What was left out of each parameter's gradients so far, in the order in which buckets hold them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from phalanx.parallel.compress.bucket import Bucket
from phalanx.parallel.compress.wire import Wire


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

    def of(self, bucket: Bucket) -> Tensor:
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
        """Multiply all of it."""
        for tensor in self._each.values():
            tensor.mul_(factor)

    def stored(self) -> list[Tensor]:
        """All of it, as it lies in memory."""
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
