"""Fingerprints of tensors, by which ranks are compared with one another and with one device without sending tensors.

A fingerprint is linear: those of two tensors add up to that of their sum. So it shows not only that two ranks differ,
but also whether each has a part of one device's tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from phalanx.witness.reference_step import Piece, cut_out

_WORDS = 8
_LONGEST = 1 << 16  # of the last dimension; signs repeat beyond it


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The fingerprint of one tensor, or of the sum of several.

    Attributes:
        products: sums of the elements, each with the sign of its place in the last dimension; one a column of signs.
        square: the sum of squares.
    """

    products: tuple[float, ...]
    square: float

    @classmethod
    def of(cls, tensor: Tensor, last: Piece = (), width: int | None = None) -> Fingerprint:
        """Return the fingerprint of ``tensor``, in fp64; ``last``: the local places among ``width`` of the last
        dimension.
        """
        values = tensor.detach()
        values = torch.view_as_real(values).flatten(-2) if values.is_complex() else values
        features = values.shape[-1] if values.dim() else 1
        if not values.numel():
            return cls((0.0,) * _WORDS, 0.0)
        columns = values.reshape(-1, features).sum(0, dtype=torch.float64).cpu()
        square = float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
        return cls(tuple((columns @ cut_out(_signs(width or features), last)).tolist()), square)

    @classmethod
    def total(cls, several: Iterable[Fingerprint]) -> Fingerprint:
        """Return the fingerprint of the sum of the ranks' parts."""
        found = list(several)
        sums = zip(*(one.products for one in found), strict=True)
        return cls(tuple(math.fsum(each) for each in sums), math.fsum(one.square for one in found))

    def plus(self, other: Fingerprint, times: float) -> Fingerprint:
        """Return the linear part of this plus ``times`` the other."""
        return Fingerprint(tuple(a + times * b for a, b in zip(self.products, other.products, strict=True)), math.nan)

    def distance(self, other: Fingerprint) -> float:
        """Return the distance of the sums, relative to the other's; NaN if one is NaN."""
        distance = math.dist(self.products, other.products)
        return distance / max(other.size, 1e-30) if distance else 0.0

    def ratio(self, other: Fingerprint) -> float:
        """Return the factor that brings the other closest to this."""
        squares = other.size**2
        return sum(a * b for a, b in zip(self.products, other.products, strict=True)) / squares if squares else math.nan

    @property
    def size(self) -> float:
        """Return the norm of the sums."""
        return math.hypot(*self.products)


@lru_cache(maxsize=256)
def _signs(features: int) -> Tensor:
    generator = torch.Generator().manual_seed(features)
    drawn = torch.randint(2, (min(features, _LONGEST), _WORDS), generator=generator) * 2.0 - 1
    return drawn.double().repeat(-(-features // _LONGEST), 1)[:features]


def in_words(piece: Piece) -> str:
    """Return a text such as ``rows 0:64``."""
    names = {0: "rows", 1: "columns"}
    runs = {dim: " and ".join(f"{a}:{b}" for a, b in ranges) for dim, ranges in piece}
    return ", ".join(f"{names.get(dim, f'dimension {dim} at')} {run}" for dim, run in runs.items())


Fingerprints = dict[str, tuple[Piece, Fingerprint]]
"""Name → which part of the tensor a rank has, and its fingerprint."""
