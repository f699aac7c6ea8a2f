"""Brings several tensors to one way of being sliced, so that an operation can run on what each rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from phalanx.parallel.sliced.axis import Axis, Placed, opened, shared, taken, whole
from phalanx.parallel.sliced.cut import Cut
from phalanx.parallel.sliced.tensor import Sliced, is_sliced


def aligned(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[tuple[Axis, int, Cut]]]:
    """The local tensors of an element-wise operation, broadcast from the right, and the cuts of its result.

    The cuts' dimensions count from the right: -1 is the last.
    """
    given = [tensor for tensor in tensors if is_sliced(tensor)]
    axes = {id(one.axis): one.axis for tensor in given for one in tensor.placed}
    current: list[Any] = list(tensors)
    cuts: list[tuple[Axis, int, Cut]] = []
    for axis in sorted(axes.values(), key=lambda axis: axis.name):
        lead = max((tensor for tensor in given if tensor.on(axis)), key=lambda tensor: tensor.numel())
        place = lead.on(axis)
        assert place is not None
        dim, cut = place.dim - lead.dim(), place.cut
        if cut.size == 1 and any(_size(other, dim) > 1 for other in tensors):
            current = [t.whole([axis]) if is_sliced(t) else t for t in current]
            continue
        current = [brought(tensor, axis, dim, cut) for tensor in current]
        cuts.append((axis, dim, cut))
    return [tensor.local if is_sliced(tensor) else tensor for tensor in current], cuts


def brought(tensor: Tensor, axis: Axis, dim: int, cut: Cut) -> Tensor:
    """``tensor`` for work in which ``axis`` cuts dimension ``dim`` (from the right) so; other axes stay as they are."""
    if isinstance(tensor, Sliced) and (place := tensor.on(axis)) is not None:
        if place.dim - tensor.dim() == dim and place.cut.same(cut):
            return tensor
        tensor = tensor.whole([axis])
    if _size(tensor, dim) == 1:
        return on_local(tensor, lambda local: shared(local, axis))
    return on_local(
        tensor, lambda local: taken(local, local.dim() + dim, cut, axis), Placed(axis, tensor.dim() + dim, cut)
    )


def gathered(tensor: Tensor, axis: Axis, *, partly: bool) -> Tensor:
    """``tensor`` whole along ``axis``; ``partly``: for work that each rank does a part of."""
    if not isinstance(tensor, Sliced) or (place := tensor.on(axis)) is None:
        return on_local(tensor, lambda local: shared(local, axis)) if partly else tensor
    gather = opened if partly else whole
    rest = [one for one in tensor.placed if one.axis is not axis]
    local = gather(tensor.local, place.dim, place.cut, axis)
    return Sliced(local, rest) if rest else local


def on_local(tensor: Tensor, change: Any, more: Placed | None = None) -> Tensor:
    """``change`` made to what this rank holds; ``more`` is a cut that it brings about."""
    if isinstance(tensor, Sliced):
        return Sliced(change(tensor.local), [*tensor.placed, *([more] if more else [])])
    changed = change(tensor)
    return Sliced(changed, [more]) if more else changed


def result(local: Tensor, cuts: Sequence[tuple[Axis, int, Cut]]) -> Tensor:
    """A result with cuts whose dimensions count from the right."""
    return Sliced(local, [Placed(axis, local.dim() + dim, cut) for axis, dim, cut in cuts]) if cuts else local


def _size(tensor: Tensor, dim: int) -> int:
    """The size of dimension ``dim`` (from the right); 1 where there is none, as broadcasting reads it."""
    return tensor.shape[dim] if -dim <= tensor.dim() else 1
