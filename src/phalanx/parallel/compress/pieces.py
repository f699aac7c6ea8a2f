"""Long tensors in pieces, so that what is computed in between stays in a processor's cache."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

_PIECE = 2**16


def pieces(flat: Tensor) -> Iterator[slice]:
    """Slices of ``flat`` (count,), multiples of 65,536 long; all of it on a device that is parallel itself."""
    count = flat.numel()
    step = _PIECE if flat.device.type == "cpu" else max(count, 1)
    for begin in range(0, count, step):
        yield slice(begin, min(begin + step, count))
