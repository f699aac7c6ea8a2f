"""A model on fake tensors or on the meta device: it runs without computing or memory, to trace its operations."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cmp_to_key
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from phalanx.errors import Problem, ProfileError


class MetaMode(TorchDispatchMode):
    """A mode in which new tensors are on the meta device.

    Output forms of elementwise operations and a few others are computed here: torch's own rules for them load its
    compiler. All other operations run unchanged.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named: dict[str, Any] = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        name = func._schema.name
        if name in _RULES:
            return _RULES[name](*args, **named)
        if not tensors:
            return func(*args, **{**named, "device": "meta"})
        if torch.Tag.pointwise not in func.tags or name in _LAID_OUT:
            return func(*args, **named)
        return args[0] if func._schema.is_mutable else _of_elements(func, args, named, tensors)


def _of_elements(func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Tensor:
    single_args, single_kwargs = tree_map(_single, (args, kwargs))
    made = func(*single_args, **single_kwargs)
    shape = np.broadcast_shapes(*(one.shape for one in tensors))
    stride = _strides(shape, [one.expand(shape).stride() for one in tensors])
    return torch.empty_strided(shape, stride, dtype=made.dtype, device="meta")


def _strides(shape: Sequence[int], each: Sequence[tuple[int, ...]]) -> list[int]:
    def further_out(one: int, other: int) -> int:
        for strides in each:
            if strides[one] and strides[other] and strides[one] != strides[other]:
                return strides[one] - strides[other]
        return 0

    found, size = [0] * len(shape), 1
    inner_first = range(len(shape))[::-1]
    for dim in sorted(inner_first, key=cmp_to_key(further_out)):
        found[dim] = size
        size *= shape[dim]
    return found


def _single(leaf: Any) -> Any:
    return torch.ones([1] * leaf.dim(), dtype=leaf.dtype, device="cpu") if isinstance(leaf, Tensor) else leaf


def _arange(*bounds: float, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    values = torch.arange(*bounds, dtype=dtype, device="cpu")
    return torch.empty(values.shape, dtype=values.dtype, device="meta")


def _cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape[dim] = sum(one.shape[dim] for one in tensors)
    return torch.empty(shape, dtype=tensors[0].dtype, device="meta")


def _repeat(one: Tensor, times: Sequence[int]) -> Tensor:
    shape = [1] * (len(times) - one.dim()) + list(one.shape)
    return torch.empty([size * many for size, many in zip(shape, times, strict=True)], dtype=one.dtype, device="meta")


def _product(one: Tensor, other: Tensor) -> Tensor:
    return torch.empty((one.shape[0], other.shape[1]), dtype=one.dtype, device="meta")


def _product_added(bias: Tensor, one: Tensor, other: Tensor, **_: Any) -> Tensor:
    return _product(one, other)


def _embedding(table: Tensor, tokens: Tensor, *_: Any) -> Tensor:
    return torch.empty((*tokens.shape, table.shape[1]), dtype=table.dtype, device="meta")


def _embedding_backward(grad: Tensor, tokens: Tensor, rows: int, *_: Any) -> Tensor:
    return torch.empty((rows, grad.shape[-1]), dtype=grad.dtype, device="meta")


def _layer_norm(input: Tensor, normalized: list[int], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    lead = input.dim() - len(normalized)
    shape = (*input.shape[:lead], *(1 for _ in normalized))
    mean, scale = (torch.empty(shape, dtype=torch.float32, device="meta") for _ in range(2))
    return _like(input), mean, scale


def _layer_norm_backward(*given: Any) -> tuple[Tensor | None, ...]:
    _, input, _, _, _, weight, bias, wanted = given
    made = zip((input, weight, bias), wanted, strict=True)
    return tuple(_like(one) if want and one is not None else None for one, want in made)


def _dropout(input: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_like(input), _empty_like(input, dtype=torch.bool)


def _log_softmax(input: Tensor, dim: int, to_fp32: bool) -> Tensor:
    return _like(input, torch.float32 if to_fp32 else None)


def _log_softmax_backward(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return _like(grad, dtype)


def _chosen(scores: Tensor, target: Tensor, weight: Tensor | None, reduction: int, *_: Any) -> tuple[Tensor, Tensor]:
    each = target.shape if reduction == _NO_REDUCTION else ()
    return torch.empty(each, dtype=scores.dtype, device="meta"), torch.empty((), dtype=scores.dtype, device="meta")


def _chosen_backward(grad: Tensor, scores: Tensor, *_: Any) -> Tensor:
    return _like(scores)


def _like(one: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(one.shape, dtype=dtype or one.dtype, device="meta")


def _empty_like(
    one: Tensor,
    *,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format = torch.preserve_format,
    **_: Any,
) -> Tensor:
    if memory_format != torch.preserve_format:
        return torch.empty(one.shape, dtype=dtype or one.dtype, device="meta", memory_format=memory_format)
    stride = _strides(one.shape, [one.stride()])
    return torch.empty_strided(one.shape, stride, dtype=dtype or one.dtype, device="meta")


_NO_REDUCTION = 0
_RULES: dict[str, Callable[..., Any]] = {
    "aten::arange": _arange,
    "aten::cat": _cat,
    "aten::empty_like": _empty_like,
    "aten::ones_like": _empty_like,
    "aten::repeat": _repeat,
    "aten::mm": _product,
    "aten::addmm": _product_added,
    "aten::embedding": _embedding,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::native_layer_norm": _layer_norm,
    "aten::native_layer_norm_backward": _layer_norm_backward,
    "aten::native_dropout": _dropout,
    "aten::_log_softmax": _log_softmax,
    "aten::_log_softmax_backward_data": _log_softmax_backward,
    "aten::nll_loss_forward": _chosen,
    "aten::nll_loss_backward": _chosen_backward,
}
_LAID_OUT = {"aten::clone"}  # what it gives may be laid out otherwise


class NothingDrawn(TorchFunctionMode):
    """A mode without random initial values, for which torch would load its compiler, though meta has none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        first = args[0] if args else given.get("tensor")
        if isinstance(first, Tensor) and first.is_meta and getattr(func, "__name__", "") in _DRAWS:
            return first
        return func(*args, **given)


_DRAWS = {"normal_", "uniform_", "trunc_normal_"}
_DRAWS |= {f"{name}_{kind}_" for name in ("xavier", "kaiming") for kind in ("uniform", "normal")}


class Values:
    """A mode whose stand-ins are copies with values, so that models whose shapes depend on them run."""

    def __enter__(self) -> Values:
        return self

    def __exit__(self, *_: object) -> None:
        pass


Mode = FakeTensorMode | MetaMode | Values
"""What stand-ins are: fakes with a device of their own, tensors of the meta device, or copies."""


def fake(mode: Mode, tensor: Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return a fake of ``tensor``. One on the meta device becomes a fake of the CPU, as the model will be.

    With ``dtype`` a tensor of fp32 becomes one of that type.
    """
    if isinstance(mode, Values):
        return _copied(tensor)
    target = device or (torch.device("cpu") if tensor.device.type == "meta" else tensor.device)
    kind = dtype if dtype is not None and tensor.dtype == torch.float32 else tensor.dtype
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device="meta")
    made = FakeTensor(mode, meta, target) if isinstance(mode, FakeTensorMode) else meta
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad) if tensor.requires_grad else made


def _copied(tensor: Tensor) -> Tensor:
    if tensor.device.type == "meta":
        made = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
        made = made.normal_(std=0.02) if made.is_floating_point() else made
    else:
        made = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad) if tensor.requires_grad else made


def resized(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``tensor`` in another shape, its own values repeated or cut."""
    times = [-(-wanted // max(have, 1)) for wanted, have in zip(shape, tensor.shape, strict=True)]
    more = tensor.detach().repeat(*times) if times else tensor.detach()
    return more[tuple(slice(0, wanted) for wanted in shape)].clone()


def fakes(mode: Mode, value: Any) -> Any:
    """Return ``value`` with a fake in place of every tensor in it."""
    return tree_map(lambda leaf: fake(mode, leaf) if isinstance(leaf, Tensor) else leaf, value)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's own report on failures with fakes: the caller gets the error, and may have another way."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def faked(module: nn.Module, mode: Mode, dtype: torch.dtype | None = None) -> Iterator[dict[int, nn.Parameter]]:
    """Put fakes in place of the parameters and buffers of ``module``, in the mode, and restore them afterwards.

    Yields id of the fake → its parameter. A parameter that is used in two places is one fake. With ``dtype`` parameters
    of fp32 are of that type.
    """
    stand_ins: dict[int, Tensor] = {}
    meant: dict[int, nn.Parameter] = {}
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for child in module.modules():
        for table in (child._parameters, child._buffers):
            kept.append((table, dict(table)))
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in stand_ins:
                    stand_ins[id(tensor)] = fake(
                        mode, tensor, dtype=dtype if isinstance(tensor, nn.Parameter) else None
                    )
                    if isinstance(tensor, nn.Parameter):
                        meant[id(stand_ins[id(tensor)])] = tensor
                table[name] = stand_ins[id(tensor)]  # pyrefly: ignore
    try:
        with mode:
            yield meant
    finally:
        for table, before in kept:
            table.update(before)


_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def refusal(error: Exception) -> ProfileError:
    """Return the error for a model that raised ``error`` on fake tensors."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(_OURS)]
    where = f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "the model"
    said = (str(error).splitlines() or [""])[0]
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        given = f"{where} (its result depends on values: {said})"
    else:
        given = f"{where} ({type(error).__name__}: {said})"
    return ProfileError(
        [
            Problem(
                where="job.model",
                given=given,
                allowed="models whose operations and shapes follow from the forms of their inputs alone",
                fix="--profile measure",
            )
        ]
    )
