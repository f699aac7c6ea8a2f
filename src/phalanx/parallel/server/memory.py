"""Tensors that lie side by side in memory, so that one operation adds all of them and one call sends them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch

from phalanx.comm.frames import views

Form = dict[str, tuple[torch.Size, torch.dtype]]
"""Name → shape and dtype, in the order of the wire: tensors of one dtype follow each other."""


def form_of(tensors: Mapping[str, torch.Tensor]) -> Form:
    """The form of ``tensors``."""
    dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors.values()))
    names = sorted(tensors, key=lambda name: dtypes.index(tensors[name].dtype))
    return {name: (tensors[name].shape, tensors[name].dtype) for name in names}


@final
class Flat:
    """One tensor for each dtype, and views of it by name.

    Attributes:
        form: names, shapes and dtypes.
        whole: the memory, a tensor of one dimension for each dtype.
        named: name → view of it.
        wire: the memory as it travels.
    """

    def __init__(self, form: Form) -> None:
        """Zeros."""
        self.form = form
        self.whole: list[torch.Tensor] = []
        self.named: dict[str, torch.Tensor] = {}
        for dtype in dict.fromkeys(dtype for _, dtype in form.values()):
            mine = {name: shape for name, (shape, kind) in form.items() if kind == dtype}
            memory = torch.zeros(sum(shape.numel() for shape in mine.values()), dtype=dtype)
            pieces = memory.split([shape.numel() for shape in mine.values()])
            self.named |= {name: piece.view(mine[name]) for name, piece in zip(mine, pieces, strict=True)}
            self.whole.append(memory)
        self.wire = views(self.whole)

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(one.nbytes for one in self.whole)

    def copy(self, other: Flat) -> None:
        """Take the values of ``other``, of the same form."""
        for mine, theirs in zip(self.whole, other.whole, strict=True):
            mine.copy_(theirs)

    def add(self, other: Flat) -> None:
        """Add ``other``, of the same form."""
        for mine, theirs in zip(self.whole, other.whole, strict=True):
            mine.add_(theirs)

    def scale(self, factor: float) -> None:
        """Multiply everything by ``factor``."""
        if factor != 1.0:
            for mine in self.whole:
                mine.mul_(factor)

    def square(self) -> float:
        """The sum of all squares, in fp64."""
        return sum(float(torch.linalg.vector_norm(one, dtype=torch.float64)) ** 2 for one in self.whole)
