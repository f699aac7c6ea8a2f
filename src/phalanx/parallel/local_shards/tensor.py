"""A tensor held in slices that model code sees as the whole.

Its shape is the whole tensor's, and every operation gives the result of the operation on the whole. Rules (``RULES``),
one for each kind of operation, say how slices are treated; without a rule, the whole is gathered and the operation runs
on every rank. So values are right for any model, and rules only save memory, time and communication.

Rules work on torch's functions, above autograd: ordinary operations run on ordinary local tensors, and autograd sees
those. torch's own DTensor does the same job below autograd; it cannot cut heads or fused projections unevenly, and has
no rule for attention on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils._pytree import tree_any, tree_map

from phalanx.device_kinds import all_kinds
from phalanx.errors import RunError
from phalanx.parallel.local_shards.axis import Axis, Placed, opened, shared, taken, whole
from phalanx.parallel.local_shards.cut import Cut

Rule = Callable[..., Any]
"""``rule(func, args, kwargs)`` → the result, or ``NotImplemented`` to gather first."""

RULES: dict[str, Rule] = {}
"""Name of torch's function or method, without the underscores of operators and in-place forms → its rule."""


class Sliced(Tensor):
    """A tensor with the whole shape and a slice in memory: ``local``, a plain tensor, followed by autograd."""

    placed: tuple[Placed, ...]  # how each axis cuts it; one dimension an axis, one axis a dimension
    _local: Tensor

    @staticmethod
    def __new__(cls, local: Tensor, placed: Iterable[Placed]) -> Sliced:
        placed = tuple(sorted(placed, key=lambda one: one.axis.name))
        shape = list(local.shape)
        for one in placed:
            shape[one.dim] = one.cut.size
        self: Sliced = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        self._local, self.placed = local, placed
        return self

    def __init__(self, *_: Any) -> None:
        pass

    @property
    def local(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            stranger = self.grad_fn
        if stranger is not None:
            raise RunError(
                f"{stranger.name()} gave a tensor that is split over ranks, whose gradient would be lost.\n"
                "    Usual cause: an own autograd.Function inside the split part of the model.\n"
                "    try: the same from torch's operations, or a plan without tp and cp for this model"
            )
        return self._local

    def on(self, axis: Any) -> Placed | None:
        return next((one for one in self.placed if one.axis is axis), None)

    def whole(self, axes: Iterable[Any] | None = None) -> Tensor:
        """Gather along ``axes``, or all; plain if no cut remains."""
        chosen = {id(axis) for axis in axes} if axes is not None else {id(one.axis) for one in self.placed}
        local, rest = self.local, []
        for one in self.placed:
            if id(one.axis) in chosen:
                local = whole(local, one.dim, one.cut, one.axis)
            else:
                rest.append(one)
        return sliced(local, rest)

    def __repr__(self, **_: Any) -> str:
        cuts = ", ".join(f"{one.dim} over {one.axis.name}" for one in self.placed)
        return f"Sliced({tuple(self.shape)}, {cuts}, here {tuple(self.local.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _rule_name(func)
        if name in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        rule = RULES.get(name)
        if rule is not None:
            result = rule(func, args, kwargs)
            if result is not NotImplemented:
                return result
        return _on_wholes(func, name, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            # autograd hands a saved tensor to hooks, and takes it back, as such a copy; what comes back must be on
            # the same graph, which is that of the local tensor
            return Sliced(args[0]._local, args[0].placed)
        raise RunError(
            f"{func} met a sliced tensor below autograd, where its slices are unknown.\n"
            "    Usual cause: an own autograd.Function or C++ operation inside the split part of the model.\n"
            "    try: a plan without tp and cp for this model"
        )


# A hook on the gradient: of what is here, which is when it comes.
RULES["register_hook"] = lambda _, args, kwargs: args[0].local.register_hook(*args[1:], **kwargs)


def sliced(local: Tensor, placed: Iterable[Placed]) -> Tensor:
    """Return ``local`` as a slice of a whole; unchanged without cuts."""
    placed = tuple(placed)
    return Sliced(local, placed) if placed else local


def is_sliced(value: Any) -> TypeGuard[Sliced]:
    """Return True if only a slice of the tensor is on this rank."""
    return type(value) is Sliced


def local_of(value: Any) -> Any:
    """Return this rank's part of a sliced tensor; other values unchanged."""
    return value.local if is_sliced(value) else value


def arguments(args: Any, kwargs: Any, **defaults: Any) -> list[Any]:
    """Return the arguments with these names, in this order, passed by position or by name."""
    named = enumerate(defaults.items())
    return [args[index] if index < len(args) else kwargs.get(name, default) for index, (name, default) in named]


METADATA = frozenset(
    """
    shape size dim ndim ndimension numel nelement dtype device requires_grad is_floating_point is_complex
    is_leaf layout is_sparse is_quantized is_meta names element_size itemsize nbytes is_nested is_mkldnn
    _base is_inference is_conj is_neg is_signed get_device is_xla grad_fn output_nr is_contiguous stride
    storage_offset len retains_grad
    """.split()
) | {f"is_{kind.torch_type}" for kind in all_kinds()}


def name_of(func: Any) -> str:
    """Return the name of a function that torch passes to an override; for a property, its name."""
    return func.__self__.__name__ if func.__name__ == "__get__" else func.__name__


def _rule_name(func: Any) -> str:
    name = name_of(func)
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
    return _ALIASES.get(name, name)


_SAME = """
    radd=add rmul=mul and=bitwise_and or=bitwise_or xor=bitwise_xor rand=bitwise_and invert=bitwise_not truediv=div
    rtruediv=rdiv floordiv=floor_divide true_divide=div divide=div multiply=mul subtract=sub negative=neg absolute=abs
    iadd=add_ isub=sub_ imul=mul_ itruediv=div_ swapaxes=transpose swapdims=transpose concat=cat concatenate=cat
    linalg_vector_norm=vector_norm
"""
_ALIASES: dict[str, str] = {alias: name for alias, _, name in (pair.partition("=") for pair in _SAME.split())}


def _on_wholes(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    if _changes_in_place(name, args, kwargs):
        raise RunError(
            f"{name} writes into a tensor that is split over ranks, in a way that its slices cannot follow.\n"
            "    try: the same without writing in place, such as torch.where in place of x[mask] = value"
        )
    args, kwargs = tree_map(lambda value: value.whole() if is_sliced(value) else value, (args, kwargs))
    return func(*args, **kwargs)


def _changes_in_place(name: str, args: Any, kwargs: Any) -> bool:
    if name == "requires_grad_":
        return False
    if is_sliced(kwargs.get("out")):
        return True
    writes = name == "setitem" or (name.endswith("_") and not name.endswith("__"))
    return writes and bool(args) and tree_any(is_sliced, args[0])


def aligned(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[tuple[Axis, int, Cut]]]:
    """Return the local operands of an element-wise operation, broadcast from the right, and the result's cuts.

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
    return [local_of(tensor) for tensor in current], cuts


def brought(tensor: Tensor, axis: Axis, dim: int, cut: Cut) -> Tensor:
    """Return ``tensor`` with ``axis`` cutting dimension ``dim`` (from the right) by ``cut``; other axes are kept."""
    if isinstance(tensor, Sliced) and (place := tensor.on(axis)) is not None:
        if place.dim - tensor.dim() == dim and place.cut.same(cut):
            return tensor
        tensor = tensor.whole([axis])
    if _size(tensor, dim) == 1:
        return on_local(tensor, lambda local: shared(local, axis))
    at = tensor.dim() + dim
    return on_local(tensor, lambda local: taken(local, at, cut, axis), Placed(axis, at, cut))


def gathered(tensor: Tensor, axis: Axis, *, partly: bool) -> Tensor:
    """Return ``tensor`` whole along ``axis``; ``partly``: for work that is shared out."""
    if not isinstance(tensor, Sliced) or (place := tensor.on(axis)) is None:
        return on_local(tensor, lambda local: shared(local, axis)) if partly else tensor
    local = (opened if partly else whole)(tensor.local, place.dim, place.cut, axis)
    return sliced(local, [one for one in tensor.placed if one.axis is not axis])


def on_local(tensor: Tensor, change: Any, more: Placed | None = None) -> Tensor:
    """Apply ``change`` to this rank's part; ``more`` is a cut that results from it."""
    if isinstance(tensor, Sliced):
        return Sliced(change(tensor.local), [*tensor.placed, *([more] if more else [])])
    changed = change(tensor)
    return Sliced(changed, [more]) if more else changed


def result(local: Tensor, cuts: Sequence[tuple[Axis, int, Cut]]) -> Tensor:
    """Return a result with cuts whose dimensions count from the right."""
    return sliced(local, [Placed(axis, local.dim() + dim, cut) for axis, dim, cut in cuts])


def _size(tensor: Tensor, dim: int) -> int:
    """Return the size of dimension ``dim`` (from the right), or 1 if there is none, as broadcasting reads it."""
    return tensor.shape[dim] if -dim <= tensor.dim() else 1
