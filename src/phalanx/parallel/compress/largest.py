"""The few largest elements, each with its place: 8 bytes an element that is sent, and nothing for the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.parallel.compress.codec import Codec


class Largest(Codec):
    """The ``share`` of the elements that is largest by magnitude, exact, and zeros for all others; one at least.

    Source: Aji and Heafield, "Sparse communication for distributed gradient descent", 2017, section 3; Stich et al.,
    "Sparsified SGD with memory", 2018.
    """

    feeds_back = True
    grain = 1

    def __init__(self, share: float) -> None:
        self._share = share

    def kept(self, count: int) -> int:
        """Elements sent of ``count``."""
        return min(count, max(1, round(self._share * count)))

    def sizes(self, count: int) -> list[tuple[int, torch.dtype]]:
        kept = self.kept(count)
        return [(kept, torch.float32), (kept, torch.int32)]

    def encode(self, flat: Tensor) -> list[Tensor]:
        places = torch.topk(flat.abs(), self.kept(flat.numel()), sorted=False).indices
        return [flat[places].float(), places.to(torch.int32)]

    def decode(self, parts: Sequence[Tensor], out: Tensor, *, add: bool = False) -> None:
        values, places = parts
        if not add:
            out.zero_()
        out.index_add_(0, places, values.to(out.dtype))  # each place once: no order to depend on
