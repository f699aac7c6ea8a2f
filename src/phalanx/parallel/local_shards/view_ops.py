"""Operations that rearrange elements: slices stay slices if each rank's part of the result comes from its own."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from phalanx.parallel.local_shards.axis import Placed
from phalanx.parallel.local_shards.tensor import RULES, Sliced, arguments, brought, is_sliced, local_of


def _rule(*names: str) -> Any:
    def add(rule: Any) -> Any:
        for name in names:
            RULES[name] = rule
        return rule

    return add


def _asked(args: list[Any], kwargs: dict[str, Any], *names: str) -> list[int] | None:
    given: Any = args if args else next((kwargs[name] for name in names if name in kwargs), ())
    if given and isinstance(given[0], Tensor):
        given = given[0].shape
    if len(given) == 1 and isinstance(given[0], tuple | list | torch.Size):
        given = given[0]
    return [int(size) for size in given] if all(isinstance(size, int) for size in given) else None


@_rule("view", "reshape", "view_as", "reshape_as")
def _viewed(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, *rest = args
    if not is_sliced(tensor) or "dtype" in kwargs:
        return NotImplemented
    sizes = _asked(rest, kwargs, "size", "shape")
    return NotImplemented if sizes is None else reshaped(tensor, sizes)


def reshaped(tensor: Sliced, sizes: list[int]) -> Any:
    """View ``tensor`` in another shape, or return ``NotImplemented`` if slices cannot follow."""
    if -1 in sizes:
        known = -prod(sizes)
        sizes = [tensor.numel() // known if size == -1 and known else size for size in sizes]
    local_sizes, placed, found = list(sizes), [], 0
    for old, new in _groups(list(tensor.shape), sizes):
        cuts = [one for one in tensor.placed if one.dim in old]
        if len(cuts) > 1:
            return NotImplemented
        for one in cuts:
            before = prod(tensor.shape[dim] for dim in old if dim < one.dim)
            after = prod(tensor.shape[dim] for dim in old if dim > one.dim)
            merged, into = one.cut.flattened(before, after), [sizes[dim] for dim in new]
            where = merged.unflattened(into)
            if where is None:
                if one.axis.trial is not None:
                    one.axis.trial.viewed(merged, into)
                return NotImplemented
            index, cut = where
            local_sizes[new[index]] = cut.length(one.axis.rank)
            placed.append(Placed(one.axis, new[index], cut))
            found += 1
    if found != len(tensor.placed):
        return NotImplemented
    return Sliced(tensor.local.reshape(local_sizes), placed)


def _groups(old: list[int], new: list[int]) -> list[tuple[list[int], list[int]]]:
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right, a, b = [], [], 1, 1
        if i < len(old):
            left, a, i = [i], old[i], i + 1
        if j < len(new):
            right, b, j = [j], new[j], j + 1
        while a != b:
            if a < b and i < len(old):
                a, left, i = a * old[i], [*left, i], i + 1
            elif j < len(new):
                b, right, j = b * new[j], [*right, j], j + 1
            else:
                return []
        found.append((left, right))
    return found


@_rule("flatten")
def _flattened(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, start, end = arguments(args, kwargs, input=None, start_dim=0, end_dim=-1)
    if not is_sliced(tensor):
        return NotImplemented
    start, end = start % tensor.dim(), end % tensor.dim()
    shape = list(tensor.shape)
    return reshaped(tensor, [*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]])


@_rule("unflatten")
def _unflattened(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, dim, sizes = arguments(args, kwargs, input=None, dim=None, sizes=None)
    if not is_sliced(tensor) or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    dim, shape, sizes = dim % tensor.dim(), list(tensor.shape), list(sizes)
    if -1 in sizes:
        sizes[sizes.index(-1)] = shape[dim] // -prod(sizes)
    return reshaped(tensor, [*shape[:dim], *sizes, *shape[dim + 1 :]])


@_rule("permute")
def _permuted(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, *rest = args
    order = _asked(rest, kwargs, "dims")
    return NotImplemented if order is None else _reordered(tensor, [dim % tensor.dim() for dim in order])


@_rule("transpose")
def _transposed(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, a, b = arguments(args, kwargs, input=None, dim0=None, dim1=None)
    order = list(range(tensor.dim()))
    a, b = a % tensor.dim(), b % tensor.dim()
    order[a], order[b] = b, a
    return _reordered(tensor, order)


@_rule("t", "T", "mT", "adjoint", "H", "mH")
def _turned(func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    order = list(range(tensor.dim()))
    return _reordered(tensor, [*order[:-2], *order[:-3:-1]] if tensor.dim() > 1 else order)


@_rule("movedim", "moveaxis")
def _moved(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, source, target = arguments(args, kwargs, input=None, source=None, destination=None)
    if not isinstance(source, int):
        return NotImplemented
    order = list(range(tensor.dim()))
    order.insert(target % tensor.dim(), order.pop(source % tensor.dim()))
    return _reordered(tensor, order)


def _reordered(tensor: Sliced, order: list[int]) -> Sliced:
    placed = [Placed(one.axis, order.index(one.dim), one.cut) for one in tensor.placed]
    return Sliced(tensor.local.permute(order), placed)


@_rule("unsqueeze")
def _unsqueezed(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, dim = arguments(args, kwargs, input=None, dim=None)
    dim %= tensor.dim() + 1
    return Sliced(tensor.local.unsqueeze(dim), [_shifted(one, dim, 1) for one in tensor.placed])


@_rule("squeeze")
def _squeezed(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, dims = arguments(args, kwargs, input=None, dim=None)
    if not isinstance(dims, int):
        return NotImplemented
    dim = dims % tensor.dim()
    if tensor.shape[dim] != 1:
        return tensor
    if any(one.dim == dim for one in tensor.placed):
        return NotImplemented
    return Sliced(tensor.local.squeeze(dim), [_shifted(one, dim, -1) for one in tensor.placed])


def _shifted(one: Placed, dim: int, by: int) -> Placed:
    return Placed(one.axis, one.dim + by if one.dim >= dim else one.dim, one.cut)


@_rule("expand", "expand_as", "broadcast_to")
def _expanded(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, *rest = args
    if not is_sliced(tensor):
        return NotImplemented
    sizes = _asked(rest, kwargs, "size", "sizes")
    if sizes is None:
        return NotImplemented
    new = len(sizes) - tensor.dim()
    placed = [Placed(one.axis, one.dim + new, one.cut) for one in tensor.placed]
    if any(sizes[one.dim] not in (-1, one.cut.size) for one in placed):
        return NotImplemented
    for one in placed:
        sizes[one.dim] = -1
    return Sliced(tensor.local.expand(sizes), placed)


@_rule("repeat_interleave")
def _repeated(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, times, dim = arguments(args, kwargs, input=None, repeats=None, dim=None)
    if not isinstance(times, int) or dim is None or not is_sliced(tensor):
        return NotImplemented
    dim %= tensor.dim()
    placed = [
        Placed(one.axis, one.dim, one.cut.flattened(1, times)) if one.dim == dim else one for one in tensor.placed
    ]
    return Sliced(tensor.local.repeat_interleave(times, dim), placed)


@_rule("narrow")
def _narrowed(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, dim, start, length = arguments(args, kwargs, input=None, dim=None, start=None, length=None)
    if not isinstance(start, int):
        return NotImplemented
    dim %= tensor.dim()
    start %= tensor.shape[dim] + 1
    return _part(tensor, dim, start, start + length)


def _part(tensor: Tensor, dim: int, start: int, stop: int) -> Any:
    place = next((one for one in tensor.placed if one.dim == dim), None) if isinstance(tensor, Sliced) else None
    if not isinstance(tensor, Sliced):
        return tensor.narrow(dim, start, stop - start)
    if place is None:
        return Sliced(tensor.local.narrow(dim, start, stop - start), tensor.placed)
    if (start, stop) == (0, place.cut.size):
        return tensor
    cut = place.cut.part(start, stop)
    if cut is None:
        return NotImplemented
    rank = place.axis.rank
    local = tensor.local.narrow(dim, place.cut.offset(rank, start), cut.length(rank))
    return Sliced(local, [Placed(place.axis, dim, cut) if one is place else one for one in tensor.placed])


@_rule("split", "split_with_sizes", "chunk", "tensor_split")
def _split(func: Any, args: Any, kwargs: Any) -> Any:
    if not is_sliced(args[0]):
        return NotImplemented
    tensor: Sliced = args[0]
    rest = dict(kwargs)
    by = args[1] if len(args) > 1 else next(rest.pop(key) for key in list(rest) if key not in ("dim",))
    dim = (args[2] if len(args) > 2 else rest.get("dim", 0)) % tensor.dim()
    # Which sizes come out is torch's business: asked of a tensor that has the size and no memory.
    probe = torch.empty(tensor.shape[dim], device="meta")
    sizes = [part.shape[0] for part in func(probe, by)]
    for one in tensor.placed:
        if one.dim == dim and one.axis.trial is not None and len(set(sizes)) == 1:
            one.axis.trial.viewed(one.cut, [len(sizes), sizes[0]])
    parts, at = [], 0
    for size in sizes:
        parts.append(_part(tensor, dim, at, at + size))
        if parts[-1] is NotImplemented:
            return NotImplemented
        at += size
    return tuple(parts)


@_rule("unbind")
def _unbound(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, dim = arguments(args, kwargs, input=None, dim=0)
    dim %= tensor.dim()
    if any(one.dim == dim for one in tensor.placed):
        return NotImplemented
    placed = [_shifted(one, dim, -1) for one in tensor.placed]
    return tuple(Sliced(local, placed) for local in tensor.local.unbind(dim))


@_rule("select")
def _selected(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, dim, index = arguments(args, kwargs, input=None, dim=None, index=None)
    dim %= tensor.dim()
    if not isinstance(index, int) or any(one.dim == dim for one in tensor.placed):
        return NotImplemented
    return Sliced(tensor.local.select(dim, index), [_shifted(one, dim, -1) for one in tensor.placed])


@_rule("getitem")
def _item(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, index = args
    if not is_sliced(tensor):
        return NotImplemented
    index = index if isinstance(index, tuple) else (index,)
    plain = (int, slice, type(None), type(Ellipsis))
    if not all(isinstance(one, plain) and not isinstance(one, bool) for one in index):
        return NotImplemented
    given = sum(one is not None and one is not Ellipsis for one in index)
    rest = [slice(None)] * (tensor.dim() - given)
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index = (*index[:at], *rest, *index[at + 1 :])
    else:
        index = (*index, *rest)
    found: Any = tensor
    dim = 0
    for one in index:
        if one is None:
            found = found.unsqueeze(dim)
            dim += 1
        elif isinstance(one, int):
            found = found.select(dim, one)
        else:
            start, stop, step = one.indices(found.shape[dim])
            if step == 1:
                found = _part(found, dim, start, max(start, stop))
            elif any(place.dim == dim for place in found.placed):
                return NotImplemented
            else:
                keep = [slice(None)] * dim
                found = Sliced(found.local[(*keep, one)], found.placed)
            if found is NotImplemented:
                return NotImplemented
            dim += 1
        if not is_sliced(found):
            return NotImplemented
    return found


@_rule("cat", "stack")
def _joined(func: Any, args: Any, kwargs: Any) -> Any:
    tensors, dim = arguments(args, kwargs, tensors=None, dim=0)
    lead = next((one for one in tensors if is_sliced(one)), None)
    if lead is None:
        return NotImplemented
    stacking = func is torch.stack
    dims = lead.dim()
    dim %= dims + stacking
    if any(one.dim() != dims for one in tensors) or (not stacking and any(one.dim == dim for one in lead.placed)):
        return NotImplemented
    for place in lead.placed:
        tensors = [brought(one, place.axis, place.dim - dims, place.cut) for one in tensors]
    ways = {tuple((id(p.axis), p.dim) for p in one.placed) if is_sliced(one) else () for one in tensors}
    if len(ways) > 1:
        return NotImplemented
    placed = [_shifted(one, dim, 1) if stacking else one for one in lead.placed]
    return Sliced(func([local_of(one) for one in tensors], dim), placed)
