"""Scaled dot-product attention of sliced queries, keys and values.

Cut between heads, each rank attends with its own heads and nothing is sent. Cut along the tokens, each rank has the
queries of its own tokens and needs everybody's keys and values; ``tokens`` says how they come.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from phalanx.parallel.sliced.align import brought, gathered
from phalanx.parallel.sliced.axis import Axis, Placed
from phalanx.parallel.sliced.cut import Cut
from phalanx.parallel.sliced.elementwise import OwnStream
from phalanx.parallel.sliced.how import How
from phalanx.parallel.sliced.tensor import RULES, is_sliced, sliced
from phalanx.parallel.sliced.tokens import attend_over, whole_mask

_HEADS, _TOKENS = -3, -2


def attention(func: Any, args: Any, kwargs: Any) -> Any:
    """torch's ``scaled_dot_product_attention``."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    default = {"dropout_p": 0.0, "is_causal": False, "enable_gqa": False}
    q, k, v, mask, dropout, causal, scale, grouped = (
        args[i] if i < len(args) else kwargs.get(name, default.get(name)) for i, name in enumerate(names)
    )
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
    how = How(_here(mask), dropout, causal, scale, grouped)
    with OwnStream(_here(q).device, list(axes.values())) if dropout else nullcontext():
        if over is None:
            local = how.run(_here(q), _here(k), _here(v))
        else:
            cut = next(cut for axis, _, cut in cuts if axis is over)
            whole = _on(k, over) is None
            local = attend_over(over, cut, (_here(q), _here(k), _here(v)), how, whole=whole)
    return sliced(local, [Placed(axis, local.dim() + dim, cut) for axis, dim, cut in cuts])


def _arranged(q: Any, k: Any, v: Any, mask: Any, axis: Axis) -> Any:
    """All of them as this axis needs them, with the dimension of the result that it cuts, from the right, and how."""
    at = {name: _on(tensor, axis) for name, tensor in (("q", q), ("k", k), ("v", v))}
    dims = {dim for found in at.values() if found for dim in (found[0],)}
    if -1 in dims:
        return None
    if at["q"] and at["q"][0] == _TOKENS:
        cut = at["q"][1]
        if not all(_same_tokens(tensor, axis, cut) for tensor in (k, v)):
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
    """Heads of keys and values go with the heads of queries that read them."""
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


def _same_tokens(tensor: Any, axis: Axis, cut: Cut) -> bool:
    """Whether keys or values are cut as the queries are."""
    place = _on(tensor, axis)
    return place is not None and place[0] == _TOKENS and place[1].same(cut)


def _rows(mask: Any, axis: Axis, cut: Cut) -> Any:
    if mask is None:
        return None
    return gathered(mask, axis, partly=True) if whole_mask(axis) else brought(mask, axis, _TOKENS, cut)


def _on(tensor: Any, axis: Axis) -> tuple[int, Cut] | None:
    place = tensor.on(axis) if is_sliced(tensor) else None
    return None if place is None else (place.dim - tensor.dim(), place.cut)


def _here(tensor: Any) -> Any:
    return tensor.local if is_sliced(tensor) else tensor


RULES["scaled_dot_product_attention"] = attention
