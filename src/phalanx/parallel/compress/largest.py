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
        places = _largest(flat.abs(), self.kept(flat.numel()))
        return [flat[places].float(), places.to(torch.int32)]

    def decode(self, parts: Sequence[Tensor], out: Tensor, *, add: bool = False) -> None:
        values, places = parts
        if not add:
            out.zero_()
        out.index_add_(0, places, values.to(out.dtype))  # each place once: no order to depend on


_STRIDE, _MANY = 64, 2**16


def _largest(sizes: Tensor, kept: int) -> Tensor:
    """Places of the ``kept`` largest.

    Selecting among millions is slow on a CPU. One element in 64 shows above what size there are about twice as many as
    are asked for, and those are selected among.
    """
    sample = sizes[::_STRIDE]
    if sizes.device.type == "cpu" and sizes.numel() >= _MANY and 0 < 2 * kept < sizes.numel():
        border = torch.topk(sample, max(1, 2 * kept // _STRIDE), sorted=False).values.amin()
        near = (~(sizes < border)).nonzero().view(-1)  # numbers that are none are among them
        if near.numel() >= kept:
            return near[torch.topk(sizes[near], kept, sorted=False).indices]
    return torch.topk(sizes, kept, sorted=False).indices
