"""A tensor of which this rank holds a slice, and which model code sees as the whole.

Its shape is the whole one's, and every operation on it gives what the operation on the whole would give. What an
operation does to slices is told by rules (``rules``), one for each kind of operation; where there is none, the whole is
gathered and the operation runs on every rank. So values are right whatever a model does, and rules only save memory,
time and communication.

Rules work on torch's functions, above autograd: what runs are ordinary operations on ordinary local tensors, and
autograd sees those. torch's own DTensor does the same job below autograd; it cannot deal heads or fused projections out
unevenly, and has no rule for attention on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils._pytree import tree_any, tree_map

from phalanx.errors import RunError
from phalanx.parallel.sliced.axis import Placed, whole

Rule = Callable[..., Any]
"""``rule(func, args, kwargs)`` → the result, or ``NotImplemented`` to gather first."""

RULES: dict[str, Rule] = {}
"""Name of torch's function or method, without the underscores of operators and in-place forms → its rule."""


class Sliced(Tensor):
    """A tensor that is whole to its reader and a slice in memory.

    Attributes:
        local: what this rank holds: a plain tensor, which autograd follows; it follows nothing else.
        placed: how each axis cuts it; one dimension an axis, one axis a dimension.
    """

    placed: tuple[Placed, ...]
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
        """How ``axis`` cuts it."""
        return next((one for one in self.placed if one.axis is axis), None)

    def whole(self, axes: Iterable[Any] | None = None) -> Tensor:
        """The same gathered along ``axes``, or all; plain where nothing remains cut."""
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
        name = _name(func)
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
            f"{func} met a sliced tensor below autograd, where nobody knows its slices.\n"
            "    Usual cause: an own autograd.Function or C++ operation inside the split part of the model.\n"
            "    try: a plan without tp and cp for this model"
        )


def _hooked(func: Any, args: Any, kwargs: Any) -> Any:
    """A hook on the gradient: of what is here, which is when it comes."""
    return args[0].local.register_hook(*args[1:], **kwargs)


RULES["register_hook"] = _hooked


def sliced(local: Tensor, placed: Iterable[Placed]) -> Tensor:
    """``local`` as a slice of a whole; itself where nothing is cut."""
    placed = tuple(placed)
    return Sliced(local, placed) if placed else local


def is_sliced(value: Any) -> TypeGuard[Sliced]:
    """Whether it is a tensor of which only a slice is here."""
    return type(value) is Sliced


METADATA = frozenset(
    """
    shape size dim ndim ndimension numel nelement dtype device requires_grad is_floating_point is_complex
    is_cuda is_leaf layout is_sparse is_quantized is_meta names element_size itemsize nbytes is_nested is_mkldnn
    _base is_inference is_conj is_neg is_signed get_device is_xla is_mps is_xpu grad_fn output_nr is_contiguous stride
    storage_offset len retains_grad
    """.split()
)

_IN_PLACE_ALLOWED = frozenset({"requires_grad_"})


def _name(func: Any) -> str:
    name: str = func.__name__
    if name == "__get__":
        return func.__self__.__name__
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
    return _ALIASES.get(name, name)


_ALIASES = {
    "radd": "add",
    "rmul": "mul",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "rand": "bitwise_and",
    "truediv": "div",
    "rtruediv": "rdiv",
    "floordiv": "floor_divide",
    "invert": "bitwise_not",
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "negative": "neg",
    "absolute": "abs",
    "iadd": "add_",
    "isub": "sub_",
    "imul": "mul_",
    "itruediv": "div_",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "concat": "cat",
    "concatenate": "cat",
    "linalg_vector_norm": "vector_norm",
}


def _on_wholes(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    if _changes_in_place(name, args, kwargs):
        raise RunError(
            f"{name} writes into a tensor that is split over ranks, in a way that its slices cannot follow.\n"
            "    try: the same without writing in place, such as torch.where in place of x[mask] = value"
        )
    gather = lambda value: value.whole() if is_sliced(value) else value  # noqa: E731
    return func(*tree_map(gather, args), **tree_map(gather, kwargs))


def _changes_in_place(name: str, args: Any, kwargs: Any) -> bool:
    if name in _IN_PLACE_ALLOWED:
        return False
    if is_sliced(kwargs.get("out")):
        return True
    writes = name == "setitem" or (name.endswith("_") and not name.endswith("__"))
    return writes and bool(args) and tree_any(is_sliced, args[0])
