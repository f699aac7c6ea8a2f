"""Two bytes an element: bf16, which has fp32's range, and fp16, which has three more bits and is kept in range."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.parallel.compress.codec import Codec
from phalanx.parallel.compress.pieces import pieces

_LOWEST, _HIGHEST = -111, 128  # exponents for which both the scale and its inverse are normal fp32 numbers


class Brain(Codec):
    """bf16, rounded to nearest: off by 2**-8 of an element at most."""

    feeds_back = False
    grain = 1

    def sizes(self, count: int) -> list[tuple[int, torch.dtype]]:
        return [(count, torch.bfloat16)]

    def encode(self, flat: Tensor) -> list[Tensor]:
        return [flat.to(torch.bfloat16)]

    def decode(self, parts: Sequence[Tensor], out: Tensor, *, add: bool = False) -> None:
        if add:
            out.add_(parts[0])
        else:
            out.copy_(parts[0])


class Half(Codec):
    """fp16, rounded to nearest: off by 2**-11 of an element at most, for elements down to 2**-28 of the largest.

    The whole tensor is first multiplied by the power of two that brings its largest element to fp16's upper end, which
    rounds nothing: what is too large for fp16 fits, and small gradients keep their digits. Smaller elements than that
    are off by 2**-39 of the largest at most.
    """

    feeds_back = False
    grain = 1

    def sizes(self, count: int) -> list[tuple[int, torch.dtype]]:
        return [(min(count, 1), torch.float32), (count, torch.float16)]

    def encode(self, flat: Tensor) -> list[Tensor]:
        if not flat.numel():
            return [flat.new_empty(0, dtype=torch.float32), flat.to(torch.float16)]
        low, high = torch.aminmax(flat.float())
        peak = torch.maximum(-low, high)
        exponent = torch.frexp(peak.nan_to_num(0.0, 0.0)).exponent.clamp(_LOWEST, _HIGHEST)
        scale = torch.ldexp(torch.ones_like(peak), 15 - exponent)
        halves = flat.new_empty(flat.numel(), dtype=torch.float16)
        for piece in pieces(flat):
            halves[piece] = flat[piece] * scale
        return [scale.reciprocal().reshape(1), halves]

    def decode(self, parts: Sequence[Tensor], out: Tensor, *, add: bool = False) -> None:
        if not out.numel():
            return
        inverse, halves = parts
        for piece in pieces(out):
            numbers = halves[piece].to(out.dtype)
            if add:
                out[piece].addcmul_(numbers, inverse)
            else:
                torch.mul(numbers, inverse, out=out[piece])
