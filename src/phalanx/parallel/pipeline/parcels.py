"""Sliced tensors on their way from stage to stage: their slices travel, and how they are cut is told once.

A stage knows the shapes of whole values before they arrive, from its fakes, but not along which tokens they are
sliced. The first time that values of some shapes pass a cut, a line of text goes ahead of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.parallel.sliced import Axis, Cut, Placed, is_sliced, sliced

_Way = list[Any]
"""How one value is cut: for each axis its name, the dimension and the cut's parts; empty for a whole one."""


class Parcels:
    """What one rank knows of the cuts of values that pass.

    Attributes:
        axes: name → the axis that values may be sliced along; without any, nothing is told.
    """

    def __init__(self) -> None:
        self.axes: Mapping[str, Axis] = {}
        self._ways: dict[Any, list[_Way]] = {}
        self._told: set[Any] = set()

    def packed(self, cut: int, values: Sequence[Tensor]) -> tuple[list[Tensor], Tensor | None]:
        """What travels of ``values``, and what has to be told before."""
        if not self.axes:
            return list(values), None
        ways = [_way(value) for value in values]
        key = _key(cut, values)
        self._ways[key] = ways
        told = None
        if key not in self._told:
            self._told.add(key)
            told = torch.tensor(list(json.dumps(ways).encode()), dtype=torch.uint8)
        return [value.local if is_sliced(value) else value for value in values], told

    def unknown(self, cut: int, fakes: Sequence[Tensor]) -> bool:
        """Whether the sender will tell how these values are cut, before they come."""
        return bool(self.axes) and _key(cut, fakes) not in self._ways

    def learn(self, cut: int, fakes: Sequence[Tensor], told: Tensor) -> None:
        """Take in what the sender told."""
        self._ways[_key(cut, fakes)] = json.loads(bytes(told.tolist()))

    def sizes(self, cut: int, fakes: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of the shapes in which these values travel."""
        found: list[Tensor] = []
        for fake, way in zip(fakes, self._of(cut, fakes), strict=True):
            shape = list(fake.shape)
            for one in self._placed(way):
                shape[one.dim] = one.cut.length(one.axis.rank)
            found.append(torch.empty(shape, dtype=fake.dtype, device="meta"))
        return found

    def unpacked(self, cut: int, fakes: Sequence[Tensor], arrived: Sequence[Tensor]) -> list[Tensor]:
        """The values, of which ``arrived`` is what travelled."""
        found: list[Tensor] = []
        for local, way in zip(arrived, self._of(cut, fakes), strict=True):
            placed = self._placed(way)
            for one in placed:
                one.axis.length = one.cut.size // one.cut.outer  # as where values are first sliced
            found.append(sliced(local, placed))
        return found

    def _of(self, cut: int, fakes: Sequence[Tensor]) -> list[_Way]:
        return self._ways[_key(cut, fakes)] if self.axes else [[] for _ in fakes]

    def _placed(self, way: _Way) -> list[Placed]:
        return [
            Placed(self.axes[name], dim, Cut(outer, units, inner, tuple(tuple(map(tuple, one)) for one in held)))
            for name, dim, outer, units, inner, held in way
        ]


def _way(value: Tensor) -> _Way:
    if not is_sliced(value):
        return []
    return [[one.axis.name, one.dim, one.cut.outer, one.cut.units, one.cut.inner, one.cut.held] for one in value.placed]


def _key(cut: int, values: Sequence[Tensor]) -> Any:
    return cut, tuple((tuple(value.shape), value.dtype) for value in values)
