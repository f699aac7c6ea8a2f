"""What every codec does: a flat tensor becomes a few smaller ones, and comes back nearly as it was."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

_ALIGNED = 4
"""Bytes that a message is a multiple of, so that several in a row can be read as wider numbers."""


class Codec(ABC):
    """Makes flat fp32 tensors smaller. Where a number is not finite, so is what it is read as: nobody misses it.

    Attributes:
        feeds_back: whether what it leaves out of a tensor is too much to be lost, and is to be added to the next one.
        grain: elements that are encoded together: a tensor is best cut at multiples of it.
    """

    feeds_back: ClassVar[bool]
    grain: ClassVar[int]

    @abstractmethod
    def sizes(self, count: int) -> list[tuple[int, torch.dtype]]:
        """Elements and type of each tensor that ``count`` elements become, the widest type first."""

    @abstractmethod
    def encode(self, flat: Tensor) -> list[Tensor]:
        """What ``flat`` (count,) becomes: contiguous tensors of ``sizes(count)``."""

    @abstractmethod
    def decode(self, parts: Sequence[Tensor], out: Tensor, *, add: bool = False) -> None:
        """Write what ``parts`` say into ``out`` (count,), fp32, or add it to what is there."""

    def bytes_of(self, count: int) -> int:
        """Bytes of the message that ``count`` elements become."""
        size = sum(length * dtype.itemsize for length, dtype in self.sizes(count))
        return -(-size // _ALIGNED) * _ALIGNED


def message(codec: Codec, flat: Tensor) -> Tensor:
    """``flat`` (count,) as one message: a uint8 tensor of ``codec.bytes_of(count)`` bytes."""
    found = flat.new_empty(codec.bytes_of(flat.numel()), dtype=torch.uint8)
    write(codec, flat, found)
    return found


def write(codec: Codec, flat: Tensor, into: Tensor) -> None:
    """Put the message that ``flat`` (count,) becomes into ``into``, which is as long as it."""
    into[-_ALIGNED:].zero_()  # what fills it up
    for target, part in zip(_parts(codec, into, flat.numel()), codec.encode(flat), strict=True):
        target.copy_(part)


def read(codec: Codec, sent: Tensor, out: Tensor, *, add: bool = False) -> None:
    """Write what the message ``sent`` says into ``out`` (count,), or add it. ``sent`` begins at a multiple of 4 bytes.

    Raises:
        ValueError: if it is not as long as a message of so many elements.
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
