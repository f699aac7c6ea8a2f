"""One byte an element: each block of 256 has a scale, and its elements are rounded to 255 levels of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.parallel.compress.codec import Codec
from phalanx.parallel.compress.pieces import pieces

_BLOCK, _LEVELS = 256, 127


class Blocks(Codec):
    """int8 with an fp32 scale a block: off by half a level at most, the largest element of the block over 254.

    Source: Dettmers, "8-bit approximations for parallelism in deep learning", 2016, section 2 (scales), with linear
    levels and by block.
    """

    feeds_back = True
    grain = _BLOCK

    def sizes(self, count: int) -> list[tuple[int, torch.dtype]]:
        return [(-(-count // _BLOCK), torch.float32), (count, torch.int8)]

    def encode(self, flat: Tensor) -> list[Tensor]:
        scale, levels = (flat.new_empty(size, dtype=dtype) for size, dtype in self.sizes(flat.numel()))
        for piece in pieces(flat):
            _encode(flat[piece].float(), scale[_rows(piece)], levels[piece])
        return [scale, levels]

    def decode(self, parts: Sequence[Tensor], out: Tensor, *, add: bool = False) -> None:
        for piece in pieces(out):
            _decode(parts[0][_rows(piece)], parts[1][piece], out[piece], add)


def _rows(piece: slice) -> slice:
    return slice(piece.start // _BLOCK, -(-piece.stop // _BLOCK))


def _encode(flat: Tensor, scale: Tensor, levels: Tensor) -> None:
    blocks = _whole(flat)
    peak = torch.maximum(-blocks.amin(dim=1), blocks.amax(dim=1))  # a fifth of what aminmax takes on a CPU
    per_level = _LEVELS / peak
    # nothing, or too little to be divided by, is sent as zeros; what is not finite makes its block so
    per_level = torch.where(per_level.isfinite(), per_level, 0.0)
    scale.copy_(torch.where(peak.isfinite(), torch.where(per_level > 0, peak / _LEVELS, 0.0), torch.nan))
    numbers = (blocks * per_level.unsqueeze(1)).round_().nan_to_num_(0.0)
    levels.copy_(numbers.view(-1)[: flat.numel()])


def _decode(scale: Tensor, levels: Tensor, out: Tensor, add: bool) -> None:
    full = out.numel() // _BLOCK
    for begin, end, rows in ((0, full * _BLOCK, slice(full)), (full * _BLOCK, out.numel(), slice(full, None))):
        if end == begin:
            continue
        target, each = out[begin:end].view(-1, min(_BLOCK, end - begin)), scale[rows].unsqueeze(1)
        numbers = levels[begin:end].view(target.shape).to(out.dtype)
        if add:
            target.addcmul_(numbers, each)
        else:
            torch.mul(numbers, each, out=target)


def _whole(flat: Tensor) -> Tensor:
    """``flat`` as rows of a block each, the last one filled up with zeros."""
    missing = -flat.numel() % _BLOCK
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, _BLOCK)
