"""Scaled dot-product attention of local shards: cut between heads, or between tokens (context parallelism).

Cut between heads, each rank attends with its own heads and sends nothing. Cut along the tokens, each rank has the
queries of its own tokens and needs all keys and values, which reach it in one of three ways.

``gather``: every rank gathers all keys and values (Dubey et al. 2024, section 3.3.2). ``alltoall``: heads are swapped
for tokens, so that each rank has some heads of all tokens, and swapped back (DeepSpeed-Ulysses; Jacobs et al. 2023);
with fewer heads than ranks this becomes a ring. ``ring``: keys and values travel from rank to rank, each adding to a
running softmax (Liu et al. 2023); no rank ever holds all of them.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phalanx.parallel.context import ring, ulysses
from phalanx.parallel.context.flash_block import SdpaArgs
from phalanx.parallel.local_shards.axis import Axis, Placed, opened, piece
from phalanx.parallel.local_shards.cut import Cut
from phalanx.parallel.local_shards.tensor import RULES, arguments, brought, gathered, is_sliced, local_of, sliced
from phalanx.parallel.rng_streams import OwnStream

_HEADS, _TOKENS = -3, -2


def attention(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute torch's ``scaled_dot_product_attention``."""
    names: dict[str, Any] = dict.fromkeys(("query", "key", "value", "attn_mask"))
    names |= {"dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    q, k, v, mask, dropout, causal, scale, grouped = arguments(args, kwargs, **names)
    axes = {id(one.axis): one.axis for t in (q, k, v, mask) if is_sliced(t) for one in t.placed}
    cuts: list[tuple[Axis, int, Cut]] = []
    over: Axis | None = None
    for axis in sorted(axes.values(), key=lambda axis: axis.name):
        found = _arranged(q, k, v, mask, axis)
        if found is None:
            return NotImplemented
        q, k, v, mask, dim, cut = found
        if dim == _TOKENS:
            over = axis
            if axis.trial is not None:
                axis.trial.attends(causal)
        cuts.append((axis, dim, cut))
    how = SdpaArgs(local_of(mask), dropout, causal, scale, grouped)
    with OwnStream(local_of(q).device, list(axes.values())) if dropout else nullcontext():
        if over is None:
            local = how.run(local_of(q), local_of(k), local_of(v))
        else:
            cut = next(cut for axis, _, cut in cuts if axis is over)
            whole = _on(k, over) is None
            local = attend_over(over, cut, (local_of(q), local_of(k), local_of(v)), how, whole=whole)
    return sliced(local, [Placed(axis, local.dim() + dim, cut) for axis, dim, cut in cuts])


def _arranged(q: Any, k: Any, v: Any, mask: Any, axis: Axis) -> Any:
    at = {name: _on(tensor, axis) for name, tensor in (("q", q), ("k", k), ("v", v))}
    dims = {dim for found in at.values() if found for dim in (found[0],)}
    if -1 in dims:
        return None
    if at["q"] and at["q"][0] == _TOKENS:
        cut = at["q"][1]
        if not all((found := at[name]) and found[0] == _TOKENS and found[1].same(cut) for name in ("k", "v")):
            # Whole ones stay whole, each rank reading them for its own queries.
            k, v = (gathered(tensor, axis, partly=True) for tensor in (k, v))
        return q, k, v, _rows(mask, axis, cut), _TOKENS, cut
    if dims - {_HEADS} or not dims:
        batch = min(dims, default=0)
        if dims != {batch} or batch >= _TOKENS:
            return None
        cut = next(found[1] for found in at.values() if found)
        q, k, v = (brought(tensor, axis, batch, cut) for tensor in (q, k, v))
        return q, k, v, None if mask is None else brought(mask, axis, batch, cut), batch, cut
    return _by_heads(q, k, v, mask, axis, at)


def _by_heads(q: Any, k: Any, v: Any, mask: Any, axis: Axis, at: dict[str, Any]) -> Any:
    heads, key_heads = q.shape[_HEADS], k.shape[_HEADS]
    each = heads // key_heads
    cut = at["q"][1] if at["q"] else next(found[1] for found in at.values() if found).flattened(1, each)
    if each == 1:
        key_cut = cut
    else:
        found = cut.unflattened((key_heads, each))
        key_cut = found[1] if found and found[0] == 0 else None
    if key_cut is None:
        return None
    q = brought(q, axis, _HEADS, cut)
    k, v = (brought(tensor, axis, _HEADS, key_cut) for tensor in (k, v))
    return q, k, v, None if mask is None else brought(mask, axis, _HEADS, cut), _HEADS, cut


def _rows(mask: Any, axis: Axis, cut: Cut) -> Any:
    if mask is None:
        return None
    return gathered(mask, axis, partly=True) if whole_mask(axis) else brought(mask, axis, _TOKENS, cut)


def _on(tensor: Any, axis: Axis) -> tuple[int, Cut] | None:
    place = tensor.on(axis) if is_sliced(tensor) else None
    return None if place is None else (place.dim - tensor.dim(), place.cut)


RULES["scaled_dot_product_attention"] = attention


def whole_mask(axis: Axis) -> bool:
    """Return True if ``attend_over`` needs the whole mask along ``axis``, not this rank's rows."""
    return axis.attention == "alltoall"


def attend_over(axis: Axis, cut: Cut, given: tuple[Tensor, Tensor, Tensor], how: SdpaArgs, *, whole: bool) -> Tensor:
    """Return the attention of this rank's queries; keys and values are ``whole``, or cut like the queries.

    ``given`` are queries, keys and values. A mask has all columns, and rows according to ``whole_mask``.
    """
    q, k, v = given
    if whole or axis.attention == "gather" or not _alike(q, k, v):
        if not whole:
            k, v = (opened(tensor, tensor.dim() - 2, cut, axis) for tensor in (k, v))
        return _token_rows(axis, cut, q, k, v, _own_rows(axis, cut, how))
    dims = q.dim()
    lead = _broadcast(*(tensor.shape[:-3] for tensor in (q, k, v)))
    q, k, v, how = _four_dimensions(*_cast(q, k, v, how), lead)
    if axis.attention == "alltoall" and q.shape[1] >= axis.size:
        out = ulysses.attend(axis, cut, q, k, v, how)
    else:
        out = ring.attend(axis, cut, q, k, v, _own_rows(axis, cut, how))
    return out.reshape(*lead, *out.shape[1 if dims > 2 else 2 :])


def _token_rows(axis: Axis, cut: Cut, q: Tensor, k: Tensor, v: Tensor, how: SdpaArgs) -> Tensor:
    mask = how.mask
    if how.causal:
        mine = positions(cut, axis.rank, q.device).unsqueeze(1) >= torch.arange(k.shape[-2], device=q.device)
        mask = mine if mask is None else mask & mine
    return replace(how, mask=mask, causal=False).run(q, k, v)


def positions(cut: Cut, rank: int, device: torch.device) -> Tensor:
    """Return the positions in the whole sequence of the tokens held by ``rank``, (tokens,)."""
    return piece(torch.arange(cut.size, device=device), 0, cut, rank)


def _own_rows(axis: Axis, cut: Cut, how: SdpaArgs) -> SdpaArgs:
    if how.mask is None or not whole_mask(axis) or how.mask.shape[-2] == 1:
        return how
    return how.masked(piece(how.mask, how.mask.dim() - 2, cut, axis.rank))


def _alike(*tensors: Tensor) -> bool:
    """Return True if the tensors can be sent together; torch itself reports errors in others."""
    return len({tensor.dtype for tensor in tensors}) == 1 and tensors[0].is_floating_point()


def _cast(q: Tensor, k: Tensor, v: Tensor, how: SdpaArgs) -> tuple[Tensor, Tensor, Tensor, SdpaArgs]:
    kind = q.device.type
    if not torch.is_autocast_enabled(kind) or q.dtype == torch.float64:
        return q, k, v, how
    dtype = torch.get_autocast_dtype(kind)
    mask = how.mask
    if mask is not None and mask.is_floating_point():
        how = how.masked(mask.to(dtype))
    return q.to(dtype), k.to(dtype), v.to(dtype), how


def _four_dimensions(
    q: Tensor, k: Tensor, v: Tensor, how: SdpaArgs, lead: torch.Size
) -> tuple[Tensor, Tensor, Tensor, SdpaArgs]:
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
