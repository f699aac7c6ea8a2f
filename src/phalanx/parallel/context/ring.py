"""Ring attention: keys and values travel from rank to rank, and no rank ever holds more than two ranks' of them.

While a rank computes with its current keys, it sends them on and receives the next ones (Liu et al. 2023). Backward
goes around once more; the gradients of keys and values travel one step behind them, adding up, and end at home. Under a
causal mask only pairs of tokens that meet are computed: if each rank holds an early and a late run of tokens, this is
half of them on every rank, in each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.parallel.context.flash_block import Gradients, Kernel, SdpaArgs, Tile, kernel_for
from phalanx.parallel.local_shards.axis import Axis, piece
from phalanx.parallel.local_shards.cut import Cut

Meeting = tuple[slice, slice, bool]
"""Which of a rank's queries meet which of a rank's keys, and whether that is causal."""


def attend(axis: Axis, cut: Cut, q: Tensor, k: Tensor, v: Tensor, how: SdpaArgs) -> Tensor:
    """Return the attention of this rank's queries to every rank's keys.

    Shapes (batch, heads, this rank's tokens, features); the mask has this rank's rows and all columns.
    """
    seed = _drawn(q.device) if how.dropout else 0
    q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k, v))
    kernel = kernel_for(q, k, v, how.mask, scale=how.scale, dropout=how.dropout)
    return _Ring.apply(_RingPass(axis, cut, kernel, how.causal, seed), q, k, v, how.mask)


def meetings(cut: Cut, mine: int, theirs: int, *, causal: bool) -> list[Meeting]:
    """Return the queries of rank ``mine`` and the keys of rank ``theirs`` that meet, both by local index.

    A rank holds its tokens in order, so that those before a place are its first ones.
    """
    rows, keys = cut.length(mine), cut.length(theirs)
    if not causal or mine == theirs:
        return [(slice(0, rows), slice(0, keys), causal)] if rows and keys else []
    found: list[Meeting] = []
    at = 0
    for start, stop in cut.expanded()[mine]:
        met = slice(0, cut.offset(theirs, start))
        if found and found[-1][1] == met:
            found[-1] = (slice(found[-1][0].start, at + stop - start), met, False)
        elif met.stop:
            found.append((slice(at, at + stop - start), met, False))
        at += stop - start
    return found


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: _RingPass, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        running = _OnlineSoftmax(q, v)
        with torch.autocast(q.device.type, enabled=False):
            for owner, (keys, values) in way.visits(k, v):
                for tile, meeting in way.tiles(owner, (q, keys, values), mask):
                    running.add(meeting[0], *way.kernel.forward(tile))
        out = running.out.to(q.dtype)
        ctx.way = way
        ctx.save_for_backward(q, k, v, mask, out, running.lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.autocast(grad.device.type, enabled=False):
            return None, *_gradients(ctx.way, grad, ctx.saved_tensors, ctx.needs_input_grad[1:])


def _gradients(way: _RingPass, grad: Tensor, saved: tuple[Any, ...], needed: tuple[bool, ...]) -> Iterator[Any]:
    q, k, v, mask, out, lse = saved
    lse = lse.masked_fill(lse == -torch.inf, 0)  # of queries that meet no key: every weight is 0 then
    grad = grad.contiguous() if grad.stride(-1) != 1 else grad
    to_q = torch.zeros_like(q, dtype=lse.dtype)
    to_mask = torch.zeros_like(mask, dtype=lse.dtype) if needed[3] else None
    home = torch.empty(0)
    behind: _Hop | None = None
    for step, (owner, held) in enumerate(way.visits(k, v)):
        flat = q.new_zeros(sum(tensor.numel() for tensor in held), dtype=lse.dtype)
        totals = (to_q, *_unpacked(flat, [tensor.shape for tensor in held]), to_mask)
        for tile, meeting in way.tiles(owner, (q, *held), mask):
            rows = (whole[:, :, meeting[0]] for whole in (grad, out, lse))
            way.add_gradients(totals, owner, meeting, way.kernel.backward(tile, *rows))
        if step == 0:
            home = flat
        elif needed[1] or needed[2]:
            if behind is not None:
                flat += behind.arrived()
            behind = way.hop(flat, way.elements(way.owner(step + 1), (k, v)))
    if behind is not None:
        home += behind.arrived()
    own_k, own_v = _unpacked(home, [k.shape, v.shape])
    yield to_q.to(q.dtype)
    yield own_k.to(k.dtype) if needed[1] else None
    yield own_v.to(v.dtype) if needed[2] else None
    yield None if to_mask is None else to_mask.to(mask.dtype)


class _OnlineSoftmax:
    """The softmax over the keys visited so far."""

    def __init__(self, q: Tensor, v: Tensor) -> None:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=dtype)
        self.lse = q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
        self._empty = True

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        if self._empty and out.shape[2] == self.out.shape[2]:
            # A copy: recomputing parts of a model may keep what torch's own operations gave.
            self.out, self.lse = out.to(self.out.dtype, copy=True), lse.clone()
        else:
            before, known = self.out[:, :, rows], self.lse[:, :, rows]
            share = torch.sigmoid(lse - known).nan_to_num_(0.0)  # where neither has met a key
            before.lerp_(out.to(before.dtype), share.unsqueeze(-1))
            known.copy_(torch.logaddexp(known, lse))
        self._empty = False


@dataclass(frozen=True, slots=True)
class _RingPass:
    """One trip around the ring, seen from this rank."""

    axis: Axis
    cut: Cut
    kernel: Kernel
    causal: bool
    seed: int

    def owner(self, step: int) -> int:
        return (self.axis.rank - step) % self.axis.size

    def visits(self, *own: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield each rank's keys and values, this rank's first; the next ones arrive while a step is computed."""
        held = list(own)
        flat = torch.cat([tensor.reshape(-1) for tensor in held])
        for step in range(self.axis.size):
            last = step == self.axis.size - 1
            hop = None if last else self.hop(flat, self.elements(self.owner(step + 1), own))
            yield self.owner(step), held
            if hop is not None:
                flat = hop.arrived()
                held = _unpacked(flat, self._shapes(self.owner(step + 1), own))

    def hop(self, flat: Tensor, elements: int) -> _Hop:
        self.axis.tell("send", flat)
        return _Hop(self.axis, flat, elements)

    def elements(self, owner: int, like: tuple[Tensor, ...]) -> int:
        return sum(prod(shape) for shape in self._shapes(owner, like))

    def _shapes(self, owner: int, like: tuple[Tensor, ...]) -> list[tuple[int, ...]]:
        length = self.cut.length(owner)
        return [(*tensor.shape[:2], length, *tensor.shape[3:]) for tensor in like]

    def tiles(self, owner: int, given: tuple[Tensor, ...], mask: Tensor | None) -> Iterator[tuple[Tile, Meeting]]:
        q, k, v = given
        columns = self._columns(mask, owner)
        for index, (rows, keys, causal) in enumerate(meetings(self.cut, self.axis.rank, owner, causal=self.causal)):
            bias = None if columns is None else columns[_part(columns, rows, keys)]
            seed = (self.seed + (owner * 1009 + index) * 0x9E3779B97F4A7C15) % 2**63
            yield Tile(q[:, :, rows], k[:, :, keys], v[:, :, keys], bias, causal, seed), (rows, keys, causal)

    def _columns(self, mask: Tensor | None, owner: int) -> Tensor | None:
        if mask is None or mask.shape[3] != self.cut.size:
            return mask
        return piece(mask, 3, self.cut, owner)

    def add_gradients(self, totals: tuple[Any, ...], owner: int, meeting: Meeting, found: Gradients) -> None:
        rows, keys, _ = meeting
        to_q, to_k, to_v, to_mask = totals
        to_q[:, :, rows] += found[0]
        to_k[:, :, keys] += found[1]
        to_v[:, :, keys] += found[2]
        if to_mask is None or found[3] is None:
            return
        rows = _part(to_mask, rows, keys)[2]
        if to_mask.shape[3] != self.cut.size:
            to_mask[:, :, rows] += found[3]
            return
        at = 0
        for start, stop in self.cut.expanded()[owner]:
            length = min(stop - start, keys.stop - at)
            if length > 0:
                to_mask[:, :, rows, start : start + length] += found[3][..., at : at + length]
            at += stop - start


class _Hop:
    """A pending message to the next rank and one from the previous rank."""

    def __init__(self, axis: Axis, flat: Tensor, elements: int) -> None:
        # Never empty: with NCCL all ranks have to take part in a group's first messages.
        self._sent = flat if flat.numel() else flat.new_zeros(1)
        self._elements = elements
        self._coming = flat.new_empty(max(1, elements))
        self._works: list[dist.Work] = []
        if axis.group is not None:
            to, source = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
            self._works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, self._sent, group=axis.group, group_peer=to),
                    dist.P2POp(dist.irecv, self._coming, group=axis.group, group_peer=source),
                ]
            )

    def arrived(self) -> Tensor:
        """Return the received tensor once it is complete; the sent tensor may be changed from then on."""
        for work in self._works:
            work.wait()
        del self._sent, self._works  # memory that somebody else may need now
        return self._coming[: self._elements]


def _part(tensor: Tensor, rows: slice, keys: slice) -> tuple[slice, slice, slice, slice]:
    every = slice(None)
    return every, every, every if tensor.shape[2] == 1 else rows, every if tensor.shape[3] == 1 else keys


def _unpacked(flat: Tensor, shapes: Any) -> list[Tensor]:
    parts = flat.split([prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _drawn(device: torch.device) -> int:
    seed = torch.randint(2**62, (), device=device)
    return int(seed) if type(seed) is Tensor and seed.device.type != "meta" else 0
