"""Attention of tokens that are dealt out over ranks (context parallelism): how keys and values meet all queries.

``gather``: every rank gathers all keys and values (Dubey et al. 2024, section 3.3.2). ``alltoall``: heads are swapped
for tokens, so that each rank has some heads of all tokens, and swapped back (DeepSpeed-Ulysses; Jacobs et al. 2023);
with fewer heads than ranks there are none to swap, and it is a ring.
``ring``: keys and values travel from rank to rank, each adding to a running softmax (Liu et al. 2023); no rank ever
holds all of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phalanx.parallel.sliced import alltoall, ring
from phalanx.parallel.sliced.axis import Axis, opened, piece
from phalanx.parallel.sliced.cut import Cut
from phalanx.parallel.sliced.how import How


def whole_mask(axis: Axis) -> bool:
    """Whether ``attend_over`` is given the mask whole along ``axis``, not this rank's rows of it."""
    return axis.attention == "alltoall"


def attend_over(axis: Axis, cut: Cut, given: tuple[Tensor, Tensor, Tensor], how: How, *, whole: bool) -> Tensor:
    """Attention of this rank's queries; keys and values are ``whole`` already, or cut as the queries are.

    ``given`` are queries, keys and values. A mask has all columns, and the rows that ``whole_mask`` says.
    """
    q, k, v = given
    if whole or axis.attention == "gather" or not _alike(q, k, v):
        if not whole:
            k, v = (opened(tensor, tensor.dim() - 2, cut, axis) for tensor in (k, v))
        return _rows(axis, cut, q, k, v, _own_rows(axis, cut, how))
    dims = q.dim()
    lead = _broadcast(*(tensor.shape[:-3] for tensor in (q, k, v)))
    q, k, v, how = _four_dimensions(*_cast(q, k, v, how), lead)
    if axis.attention == "alltoall" and q.shape[1] >= axis.size:
        out = alltoall.attend(axis, cut, q, k, v, how)
    else:
        out = ring.attend(axis, cut, q, k, v, _own_rows(axis, cut, how))
    return out.reshape(*lead, *out.shape[1 if dims > 2 else 2 :])


def _rows(axis: Axis, cut: Cut, q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
    """This rank's rows of the whole attention."""
    mask = how.mask
    if how.causal:
        mine = positions(cut, axis.rank, q.device).unsqueeze(1) >= torch.arange(k.shape[-2], device=q.device)
        mask = mine if mask is None else mask & mine
    return replace(how, mask=mask, causal=False).run(q, k, v)


def positions(cut: Cut, rank: int, device: torch.device) -> Tensor:
    """Where in the whole sequence the tokens that ``rank`` holds stand, (tokens,)."""
    return piece(torch.arange(cut.size, device=device), 0, cut, rank)


def _own_rows(axis: Axis, cut: Cut, how: How) -> How:
    if how.mask is None or not whole_mask(axis) or how.mask.shape[-2] == 1:
        return how
    return how.masked(piece(how.mask, how.mask.dim() - 2, cut, axis.rank))


def _alike(*tensors: Tensor) -> bool:
    """Whether these can be sent together; torch itself says what is wrong with others."""
    return len({tensor.dtype for tensor in tensors}) == 1 and tensors[0].is_floating_point()


def _cast(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor, Tensor, How]:
    """In the type that autocast gives attention, where that is on."""
    kind = q.device.type
    if not torch.is_autocast_enabled(kind) or q.dtype == torch.float64:
        return q, k, v, how
    dtype = torch.get_autocast_dtype(kind)
    mask = how.mask
    if mask is not None and mask.is_floating_point():
        how = how.masked(mask.to(dtype))
    return q.to(dtype), k.to(dtype), v.to(dtype), how


def _four_dimensions(q: Tensor, k: Tensor, v: Tensor, how: How, lead: torch.Size) -> tuple[Tensor, Tensor, Tensor, How]:
    """As (batch, heads, tokens, features): the dimensions before the heads, ``lead``, made one."""
    q, k, v = (tensor[(None,) * max(0, 3 - tensor.dim())] for tensor in (q, k, v))
    if not how.grouped:
        heads = _broadcast(*(tensor.shape[-3:-2] for tensor in (q, k, v)))
        q, k, v = (tensor.expand(*tensor.shape[:-3], *heads, *tensor.shape[-2:]) for tensor in (q, k, v))
    q, k, v = (_folded(tensor.expand(*lead, *tensor.shape[-3:])) for tensor in (q, k, v))
    mask: Any = how.mask
    if mask is not None:
        mask = mask[(None,) * max(0, 4 - mask.dim())]
        if mask.dim() > 4:
            mask = mask.expand(*lead, *mask.shape[-3:])
        mask = _folded(mask)
    return q, k, v, how.masked(mask)


def _broadcast(*shapes: torch.Size) -> torch.Size:
    # torch's own imports sympy, and shapes hardly ever differ.
    return shapes[0] if len(set(shapes)) == 1 else torch.broadcast_shapes(*shapes)


def _folded(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 4 else tensor.reshape(-1, *tensor.shape[-3:])
