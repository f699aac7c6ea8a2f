"""Attention with heads swapped for tokens: each rank has some heads of all tokens (Jacobs et al. 2023).

One exchange takes queries, keys and values there, and one brings the results back. Heads need not divide by the ranks.
With fewer heads of keys than ranks, a head goes to every rank with queries that read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.parallel.context.flash_block import SdpaArgs
from phalanx.parallel.local_shards.axis import Axis, concatenated, piece
from phalanx.parallel.local_shards.cut import Cut

Heads = tuple[tuple[int, int], ...]
"""For each rank the heads [start, stop) that it has of all tokens; ranks may have the same ones."""

_HEADS, _TOKENS = 1, 2


def attend(axis: Axis, cut: Cut, q: Tensor, k: Tensor, v: Tensor, how: SdpaArgs) -> Tensor:
    """Return the attention of this rank's queries to every rank's keys.

    Shapes (batch, heads, this rank's tokens, features), with at least as many heads of queries as ranks; the mask is
    whole.
    """
    each = q.shape[_HEADS] // k.shape[_HEADS]
    heads, key_heads = shares(q.shape[_HEADS], each, axis.size)
    swap = _Swap(axis, cut)
    q, k, v = _ToHeads.apply(swap, (heads, key_heads, key_heads), q, k, v)
    if q.shape[_HEADS] != each * k.shape[_HEADS]:
        (first, stop), (offset, _) = heads[axis.rank], key_heads[axis.rank]
        read = torch.arange(first, stop, device=k.device) // each - offset
        k, v = k.index_select(_HEADS, read), v.index_select(_HEADS, read)
    if how.mask is not None and how.mask.shape[_HEADS] > 1:
        start, stop = heads[axis.rank]
        how = how.masked(how.mask[:, start:stop])
    (out,) = _ToTokens.apply(swap, (heads,), how.run(q, k, v))
    return out


def shares(heads: int, each: int, ranks: int) -> tuple[Heads, Heads]:
    """Return each rank's heads of queries and of keys; ``each`` heads of queries read a head of keys."""
    groups = heads // each
    if groups >= ranks:
        key_heads = Cut.even(groups, ranks).expanded()
        starts = [held[0][0] for held in key_heads] + [groups]
        return tuple((a * each, b * each) for a, b in pairwise(starts)), tuple(pairwise(starts))
    starts = [held[0][0] for held in Cut.even(heads, ranks).expanded()] + [heads]
    return tuple(pairwise(starts)), tuple((a // each, (b - 1) // each + 1) for a, b in pairwise(starts))


class _ToHeads(torch.autograd.Function):
    """Exchange of all heads of this rank's tokens for this rank's heads of all tokens. Backward: ``_ToTokens``."""

    @staticmethod
    def forward(ctx: Any, swap: _Swap, heads: Sequence[Heads], *given: Tensor) -> Any:
        ctx.swap, ctx.heads, ctx.counts = swap, heads, [tensor.shape[_HEADS] for tensor in given]
        return swap.to_heads(heads, given)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *ctx.swap.to_tokens(ctx.heads, ctx.counts, grads)


class _ToTokens(torch.autograd.Function):
    """Exchange of this rank's heads of all tokens for all heads of this rank's tokens. Backward: ``_ToHeads``."""

    @staticmethod
    def forward(ctx: Any, swap: _Swap, heads: Sequence[Heads], *given: Tensor) -> Any:
        ctx.swap, ctx.heads = swap, heads
        return swap.to_tokens(heads, [one[-1][1] for one in heads], given)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *ctx.swap.to_heads(ctx.heads, grads)


class _Swap:
    """Exchanges of heads for tokens on one axis, with several tensors in one message to each rank."""

    def __init__(self, axis: Axis, cut: Cut) -> None:
        self._axis, self._cut = axis, cut

    def to_heads(self, heads: Sequence[Heads], given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        out = [
            [tensor[:, start:stop] for tensor, (start, stop) in zip(given, to, strict=True)]
            for to in zip(*heads, strict=True)
        ]
        mine = [one[self._axis.rank] for one in heads]
        came = self._exchange(out, [_shapes(given, mine, length) for length in self._cut.lengths])
        return tuple(concatenated(list(pieces), _TOKENS, self._cut) for pieces in zip(*came, strict=True))

    def to_tokens(self, heads: Sequence[Heads], counts: Sequence[int], given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        axis, cut = self._axis, self._cut
        out = [[piece(tensor, _TOKENS, cut, rank) for tensor in given] for rank in range(axis.size)]
        shapes = [_shapes(given, source, cut.length(axis.rank)) for source in zip(*heads, strict=True)]
        came = zip(*self._exchange(out, shapes), strict=True)
        return tuple(_added_up(list(parts), one, count) for parts, one, count in zip(came, heads, counts, strict=True))

    def _exchange(
        self, out: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
    ) -> list[list[Tensor]]:
        flat = torch.cat([tensor.reshape(-1) for tensors in out for tensor in tensors])
        coming = [sum(prod(shape) for shape in one) for one in shapes]
        buffer = flat.new_empty(sum(coming))
        self._axis.tell("all_to_all", flat)
        if self._axis.group is not None:
            going = [sum(tensor.numel() for tensor in tensors) for tensors in out]
            dist.all_to_all_single(buffer, flat, coming, going, group=self._axis.group)
        parts = iter(buffer.split([prod(shape) for one in shapes for shape in one]))
        return [[next(parts).view(shape) for shape in one] for one in shapes]


def _shapes(given: Sequence[Tensor], heads: Sequence[tuple[int, int]], tokens: int) -> list[tuple[int, ...]]:
    each = zip(given, heads, strict=True)
    return [(tensor.shape[0], stop - start, tokens, tensor.shape[3]) for tensor, (start, stop) in each]


def _added_up(parts: list[Tensor], heads: Heads, count: int) -> Tensor:
    if all(before[1] == after[0] for before, after in pairwise(heads)):
        return torch.cat(parts, _HEADS)
    total = parts[0].new_zeros((parts[0].shape[0], count, *parts[0].shape[2:]))
    for part, (start, stop) in zip(parts, heads, strict=True):
        total[:, start:stop] += part
    return total
