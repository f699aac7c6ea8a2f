"""Codecs: a flat tensor becomes a few smaller ones and is restored approximately; and the limits of each codec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from phalanx.config import Job, Plan
from phalanx.config.sync import CODECS, CodecFacts, Compression
from phalanx.errors import Problem
from phalanx.parallel.grad_reduce import sparse
from phalanx.units import show_names

_ALIGNED = 4
"""Bytes that a message is a multiple of, so that several in a row can be read as wider numbers."""


class Codec(ABC):
    """A compressor of flat fp32 tensors. Non-finite numbers stay non-finite, so that they are noticed."""

    facts: ClassVar[CodecFacts]

    @abstractmethod
    def sizes(self, count: int) -> list[tuple[int, torch.dtype]]:
        """Return number and type of elements of each tensor for ``count`` elements, the widest type first."""

    @abstractmethod
    def encode(self, flat: Tensor) -> list[Tensor]:
        """Encode ``flat`` (count,) as contiguous tensors of ``sizes(count)``."""

    @abstractmethod
    def decode(self, parts: Sequence[Tensor], out: Tensor, *, add: bool = False) -> None:
        """Decode ``parts`` into ``out`` (count,), fp32, or add them to it."""

    def bytes_of(self, count: int) -> int:
        """Return the bytes of a message of ``count`` elements."""
        size = sum(length * dtype.itemsize for length, dtype in self.sizes(count))
        return -(-size // _ALIGNED) * _ALIGNED


def message(codec: Codec, flat: Tensor) -> Tensor:
    """Encode ``flat`` (count,) as one message: a uint8 tensor of ``codec.bytes_of(count)`` bytes."""
    found = flat.new_empty(codec.bytes_of(flat.numel()), dtype=torch.uint8)
    write(codec, flat, found)
    return found


def write(codec: Codec, flat: Tensor, into: Tensor) -> None:
    """Write the message of ``flat`` (count,) into ``into``, which has its length."""
    into[-_ALIGNED:].zero_()  # padding
    for target, part in zip(_parts(codec, into, flat.numel()), codec.encode(flat), strict=True):
        target.copy_(part)


def read(codec: Codec, sent: Tensor, out: Tensor, *, add: bool = False) -> None:
    """Decode the message ``sent`` into ``out`` (count,), or add it. ``sent`` begins at a multiple of 4 bytes.

    Raises:
        ValueError: if its length does not match the number of elements.
    """
    expected = codec.bytes_of(out.numel())
    if sent.numel() != expected:
        raise ValueError(f"a message of {sent.numel()} bytes; {out.numel()} elements take {expected}")
    codec.decode(_parts(codec, sent, out.numel()), out, add=add)


def _parts(codec: Codec, whole: Tensor, count: int) -> list[Tensor]:
    found, at = list[Tensor](), 0
    for length, dtype in codec.sizes(count):
        end = at + length * dtype.itemsize
        found.append(whole[at:end].view(dtype))
        at = end
    return found


_PIECE = 2**16


def pieces(flat: Tensor) -> Iterator[slice]:
    """Yield slices of ``flat`` (count,), multiples of 65,536 long; a single one on a device that is parallel itself."""
    count = flat.numel()
    step = _PIECE if flat.device.type == "cpu" else max(count, 1)
    for begin in range(0, count, step):
        yield slice(begin, min(begin + step, count))


_LOWEST, _HIGHEST = -111, 128  # exponents for which both the scale and its inverse are normal fp32 numbers


class Bf16(Codec):
    """bf16, rounded to nearest: off by 2**-8 of an element at most."""

    facts = CODECS["bf16"]

    def sizes(self, count: int) -> list[tuple[int, torch.dtype]]:
        return [(count, torch.bfloat16)]

    def encode(self, flat: Tensor) -> list[Tensor]:
        return [flat.to(torch.bfloat16)]

    def decode(self, parts: Sequence[Tensor], out: Tensor, *, add: bool = False) -> None:
        if add:
            out.add_(parts[0])
        else:
            out.copy_(parts[0])


class Fp16(Codec):
    """fp16, rounded to nearest: off by at most 2**-11 of an element, for elements down to 2**-28 of the largest.

    The whole tensor is first multiplied by the power of two that brings its largest element to fp16's upper end,
    without rounding: numbers too large for fp16 fit, and small gradients keep their digits. Smaller elements are off by
    at most 2**-39 of the largest.
    """

    facts = CODECS["fp16"]

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


_BLOCK, _LEVELS = CODECS["int8"].grain, 127


class Int8Blocks(Codec):
    """int8 with an fp32 scale a block: off by half a level at most, the largest element of the block over 254.

    Source: Dettmers, "8-bit approximations for parallelism in deep learning", 2016, section 2 (scales), with linear
    levels and by block.
    """

    facts = CODECS["int8"]

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
    missing = -flat.numel() % _BLOCK
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, _BLOCK)


class TopK(Codec):
    """The largest ``share`` of the elements by magnitude, exact, at least one, and zeros for all others.

    Source: Aji and Heafield, "Sparse communication for distributed gradient descent", 2017, section 3; Stich et al.,
    "Sparsified SGD with memory", 2018.
    """

    facts = CODECS["topk"]

    def __init__(self, share: float) -> None:
        self._share = share

    def sent_count(self, count: int) -> int:
        return min(count, max(1, round(self._share * count)))

    def sizes(self, count: int) -> list[tuple[int, torch.dtype]]:
        kept = self.sent_count(count)
        return [(kept, torch.float32), (kept, torch.int32)]

    def encode(self, flat: Tensor) -> list[Tensor]:
        places = _largest(flat.abs(), self.sent_count(flat.numel()))
        return [flat[places].float(), places.to(torch.int32)]

    def decode(self, parts: Sequence[Tensor], out: Tensor, *, add: bool = False) -> None:
        values, places = parts
        if not add:
            out.zero_()
        out.index_add_(0, places, values.to(out.dtype))  # each place once: no order to depend on


_STRIDE, _MANY = 64, 2**16


def _largest(sizes: Tensor, kept: int) -> Tensor:
    """Return the indices of the ``kept`` largest elements.

    Selection among millions is slow on a CPU. A sample of one element in 64 gives a threshold that about twice as many
    exceed, and only those are selected among.
    """
    sample = sizes[::_STRIDE]
    if sizes.device.type == "cpu" and sizes.numel() >= _MANY and 0 < 2 * kept < sizes.numel():
        border = torch.topk(sample, max(1, 2 * kept // _STRIDE), sorted=False).values.amin()
        near = (~(sizes < border)).nonzero().view(-1)  # numbers that are none are among them
        if near.numel() >= kept:
            return near[torch.topk(sizes[near], kept, sorted=False).indices]
    return torch.topk(sizes, kept, sorted=False).indices


def codec(text: str) -> Codec | None:
    """Return the codec for ``fp16``, ``bf16``, ``int8`` or ``topk:0.01``; ``None`` for ``none``.

    Raises:
        ValueError: for others, PowerSGD included: its messages depend on shapes of gradients and on other ranks.
    """
    asked = Compression.parse(text)
    match asked.codec:
        case "none":
            return None
        case "fp16":
            return Fp16()
        case "bf16":
            return Bf16()
        case "int8":
            return Int8Blocks()
        case "topk":
            return TopK(asked.amount)
        case _:
            raise ValueError(f"{text} is no codec of flat tensors")


def check(job: Job, plan: Plan) -> list[Problem]:
    """Return the problems of ``plan.compress`` with a job."""
    if not _gradients(plan) or job.unused != "allow" or not Compression.parse(plan.compress).facts.feeds_back:
        return []
    return [
        Problem(
            where="plan.compress",
            given=f'compress={plan.compress} with unused="allow"',
            allowed="fp16 or bf16 there: what others leave out of a gradient comes with the parameter's next one, and "
            "a step that does not use the parameter drops it",
            fix=str(replace(plan, compress="bf16")),
        )
    ]


def problems(module: nn.Module, plan: Plan) -> list[Problem]:
    """Return the problems of ``plan.compress`` with the gradients of ``module``."""
    if not _gradients(plan):
        return []
    numbers = [name for name, one in module.named_parameters() if one.requires_grad and one.is_complex()]
    found = [f"sparse gradients of {show_names(names)}"] if (names := sparse(module)) else []
    found += [f"complex gradients of {show_names(numbers)}"] if numbers else []
    if not found:
        return []
    given = f"{' and '.join(found)} with compress={plan.compress}"
    allowed = "dense gradients of real numbers: they are sent by blocks and matrices of elements"
    return [Problem(where="plan.compress", given=given, allowed=allowed, fix=str(replace(plan, compress="none")))]


def optimizer_problems(optimizer: torch.optim.Optimizer, plan: Plan) -> list[Problem]:
    """Return a problem if ``optimizer`` is Rprop under ``topk``.

    Rprop steps by signs, and takes an element of zero for one that has converged.
    """
    if not isinstance(optimizer, torch.optim.Rprop) or not plan.compress.startswith("topk"):
        return []
    given = f"{type(optimizer).__name__} with compress={plan.compress}"
    allowed = "not topk: Rprop steps by signs alone, and topk gives all but the largest elements none"
    return [Problem(where="job.optimizer", given=given, allowed=allowed, fix=str(replace(plan, compress="bf16")))]


def _gradients(plan: Plan) -> bool:
    return plan.compress != "none" and plan.sync == "each" and not plan.server
