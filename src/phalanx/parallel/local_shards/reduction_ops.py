"""Operations over some dimensions: no communication unless the cut dimension is among them."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.config.losses import IGNORED
from phalanx.parallel.local_shards.axis import Axis, Placed, total
from phalanx.parallel.local_shards.tensor import (
    RULES,
    Sliced,
    aligned,
    arguments,
    gathered,
    is_sliced,
    local_of,
    result,
    sliced,
)

_ADDED = {"sum", "mean"}
_OTHERS = """
    amax amin max min var std var_mean std_mean prod all any argmax argmin logsumexp norm vector_norm median
    count_nonzero nansum nanmean
""".split()
_ALONG = ("softmax", "log_softmax", "cumsum", "cumprod", "sort", "argsort", "topk", "flip", "normalize", "softmin")


def reduced(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute a reduction. Over a cut dimension only sums and means have a rule."""
    tensor = args[0] if args else kwargs.get("input")
    if not is_sliced(tensor):
        return NotImplemented
    name = func.__name__
    given = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
    if "vector_norm" in name or (name == "norm" and not isinstance(given, int | tuple | list)):
        given = kwargs.get("dim", args[2] if len(args) > 2 else None)
    if isinstance(given, Tensor):
        return NotImplemented
    dims = range(tensor.dim()) if given is None else (given,) if isinstance(given, int) else tuple(given)
    dims = {dim % tensor.dim() for dim in dims} if tensor.dim() else set()
    over = [one for one in tensor.placed if one.dim in dims]
    keep = bool(kwargs.get("keepdim", args[2] if len(args) > 2 and isinstance(args[2], bool) else False))
    rest = [
        Placed(one.axis, one.dim if keep else one.dim - sum(dim < one.dim for dim in dims), one.cut)
        for one in tensor.placed
        if one.dim not in dims
    ]
    if not over:
        found = func(tensor.local, *args[1:], **kwargs)
        if isinstance(found, tuple):
            return type(found)([sliced(one, rest) for one in found]) if rest else found
        return sliced(found, rest)
    if name not in _ADDED:
        return NotImplemented
    local = torch.sum(tensor.local, *args[1:], **kwargs)
    for one in over:
        local = total(local, one.axis)
    if name == "mean":
        local = local / prod(tensor.shape[dim] for dim in dims)
    return sliced(local, rest)


def along(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute an operation along one dimension that is not cut."""
    tensor = args[0] if args else kwargs.get("input")
    if not is_sliced(tensor):
        return NotImplemented
    default = {"normalize": 1, "topk": -1, "sort": -1, "argsort": -1}.get(func.__name__)
    at = {"normalize": 2, "topk": 2}.get(func.__name__, 1)
    dim = kwargs.get("dim", kwargs.get("dims", args[at] if len(args) > at else default))
    if isinstance(dim, tuple | list) and len(dim) == 1:
        dim = dim[0]
    if not isinstance(dim, int) or any(one.dim == dim % tensor.dim() for one in tensor.placed):
        return NotImplemented
    rest = args[1:] if args else ()
    kwargs = {key: value for key, value in kwargs.items() if key != "input"}
    found = func(tensor.local, *rest, **kwargs)
    if isinstance(found, tuple):
        return type(found)([Sliced(one, tensor.placed) for one in found])
    return Sliced(found, tensor.placed)


def normed(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute layer or RMS normalisation over last dimensions that are not cut."""
    names = ("weight", *_AFTER_WEIGHT[func.__name__])
    tensor, shape, *rest = arguments(args, kwargs, input=None, normalized_shape=None, **dict.fromkeys(names))
    if not is_sliced(tensor):
        return NotImplemented
    normal = range(tensor.dim() - len(shape), tensor.dim())
    if any(one.dim in normal for one in tensor.placed) or any(is_sliced(one) for one in rest):
        return NotImplemented
    for one in tensor.placed:
        rest = [gathered(other, one.axis, partly=True) if isinstance(other, Tensor) else other for other in rest]
    given = {name: value for name, value in zip(names, rest, strict=True) if name == "weight" or value is not None}
    return Sliced(func(tensor.local, shape, **given), tensor.placed)


_AFTER_WEIGHT = {"layer_norm": ("bias", "eps"), "rms_norm": ("eps",)}


def cross_entropy(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute cross entropy of logits cut along samples, classes, or both; classes are the last dimension.

    Over cut classes (Shoeybi et al. 2019, section 3) three numbers a sample are sent: the largest logit, the sum of
    exponentials, and the target's logit; with label smoothing the sum of logits too.
    """
    names = dict.fromkeys(("input", "target", "weight", "size_average", "ignore_index", "reduce"))
    logits, target, weight, average, ignored, reduce, reduction, smoothing = arguments(
        args, kwargs, **(names | {"ignore_index": IGNORED, "reduction": "mean", "label_smoothing": 0.0})
    )
    if not is_sliced(logits) or logits.dim() != 2 or target.dim() != 1:
        return NotImplemented
    if weight is not None or average is not None or reduce is not None or target.is_floating_point():
        return NotImplemented
    each = _each_cross_entropy(logits, target, ignored, smoothing)
    if reduction == "none":
        return each
    summed = each.sum()
    return summed if reduction == "sum" else summed / (target != ignored).sum()


def _each_cross_entropy(logits: Sliced, target: Tensor, ignored: int, smoothing: float) -> Tensor:
    by_class = next((one for one in logits.placed if one.dim == 1), None)
    if by_class is None:
        (local, mine), cuts = aligned([logits, target.unsqueeze(1)])
        losses = torch.nn.functional.cross_entropy(
            local, mine.squeeze(1), ignore_index=ignored, reduction="none", label_smoothing=smoothing
        )
        return result(losses, [(axis, dim + 1, cut) for axis, dim, cut in cuts])
    axis, cut = by_class.axis, by_class.cut
    samples = [one for one in logits.placed if one is not by_class]
    if samples:
        (_, mine), _ = aligned([Sliced(logits.local[:, :1], samples), target.unsqueeze(1)])
        target = mine.squeeze(1)
    local = logits.local
    top = local.detach().amax(1) if local.shape[1] else local.new_full((local.shape[0],), -torch.inf)
    shifted = local - axis.add_up(top, dist.ReduceOp.MAX).unsqueeze(1)
    normal = total(shifted.exp().sum(1), axis).log()
    here, place = _at_home(target, cut, axis)
    picked = total(shifted.gather(1, place.unsqueeze(1)).squeeze(1) * here if local.shape[1] else normal * 0, axis)
    losses = normal - picked
    if smoothing:
        spread = normal - total(shifted.sum(1), axis) / cut.size
        losses = (1 - smoothing) * losses + smoothing * spread
    return sliced(losses.masked_fill(target == ignored, 0.0), samples)


def _at_home(index: Tensor, cut: Any, axis: Axis) -> tuple[Tensor, Tensor]:
    here = torch.zeros_like(index, dtype=torch.bool)
    place = torch.zeros_like(index)
    at = 0
    for start, stop in cut.expanded()[axis.rank]:
        inside = (index >= start) & (index < stop)
        here = here | inside
        place = torch.where(inside, index - start + at, place)
        at += stop - start
    return here, place


def embedding(func: Any, args: Any, kwargs: Any) -> Any:
    """Look up rows of a table: a table cut by rows gives a sum over ranks, one cut by columns a cut result."""
    ids, weight, padding, most = arguments(args, kwargs, input=None, weight=None, padding_idx=None, max_norm=None)
    if most is not None or any(kwargs.get(name) for name in ("scale_grad_by_freq", "sparse")):
        return NotImplemented
    placed = list(ids.placed) if is_sliced(ids) else []
    index: Tensor = local_of(ids)
    for one in placed:
        weight = gathered(weight, one.axis, partly=True)
    rows = next((one for one in weight.placed if one.dim == 0), None) if is_sliced(weight) else None
    columns = [one for one in weight.placed if one.dim == 1] if is_sliced(weight) else []
    table: Tensor = local_of(weight)
    placed += [Placed(one.axis, index.dim(), one.cut) for one in columns]
    if rows is None:
        return sliced(torch.nn.functional.embedding(index, table, padding), placed)
    here, place = _at_home(index, rows.cut, rows.axis)
    if padding is not None:  # the row that gets no gradient, by its place among this rank's
        at_home, at = _at_home(torch.tensor(padding % rows.cut.size), rows.cut, rows.axis)
        padding = int(at) if at_home else None
    found = torch.nn.functional.embedding(place, table, padding) * here.unsqueeze(-1)
    return sliced(total(found, rows.axis), placed)


for _name in (*_ADDED, *_OTHERS):
    RULES[_name] = reduced
for _name in _ALONG:
    RULES[_name] = along
for _name in _AFTER_WEIGHT:
    RULES[_name] = normed
RULES.update(cross_entropy=cross_entropy, embedding=embedding)
