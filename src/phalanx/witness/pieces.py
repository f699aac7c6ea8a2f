"""Which piece of a whole tensor a rank has: of every dimension that is cut, ranges of places."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Ranges = tuple[tuple[int, int], ...]
Piece = tuple[tuple[int, Ranges], ...]
"""Which part of a whole tensor: the dimensions that are cut, and the ranges [start, stop) of each; none: all of it."""


def piece_of(tensor: Tensor, holding: Any) -> Piece:
    """Which part of the whole this rank has in ``tensor``; ``holding``: its ``TensorShard``, ``None`` where not cut."""
    placed = holding.placed if holding is not None else ()
    ranges: dict[int, Ranges] = {one.dim: one.cut.expanded()[one.axis.rank] for one in placed}
    if chunks := getattr(tensor, "__create_chunk_list__", None):
        (chunk,) = chunks()
        for dim, (at, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            if size != tensor.shape[dim]:
                known = ranges.get(dim, ((0, tensor.shape[dim]),))
                ranges[dim] = _within(known, at, at + size)
    return tuple(sorted(ranges.items()))


def _within(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Of the elements that ``ranges`` hold, those from the ``start``-th to the ``stop``-th."""
    found: list[tuple[int, int]] = []
    before = 0
    for a, b in ranges:
        first, last = a + max(start - before, 0), min(b, a + stop - before)
        if first < last:
            found.append((first, last))
        before += b - a
    return tuple(found)


def cut_out(whole: Tensor, piece: Piece) -> Tensor:
    """That part of ``whole``."""
    for dim, ranges in piece:
        runs = [whole.narrow(dim, start, stop - start) for start, stop in ranges]
        whole = torch.cat(runs, dim) if runs else whole.narrow(dim, 0, 0)
    return whole
