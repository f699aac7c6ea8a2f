"""The kind and amount of work of operations; functions that accelerators run as one kernel.

Functions that accelerators run as one kernel and the CPU does not are recorded as on accelerators. Inside
``as_on_accelerators`` attention, dropout and RMS norm are one operation forward and one backward, and keep the tensors
of their fused kernels: attention the sums of its softmax instead of its scores, dropout a mask of one byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from phalanx.trace.operation_recorder import OperationRecorder, RecordedOperation, TensorUse

Kind = Literal["matmul", "convolution", "attention", "memory"]


@dataclass(frozen=True, slots=True)
class KernelWork:
    """One kernel's work at the traced size."""

    kind: Kind  # its bound
    name: str  # as the framework calls it
    dims: tuple[float, ...]  # as in ``Operation``
    traffic: float  # elements read and written
    operands: tuple[TensorUse, ...]  # of a product, its factors
    step: RecordedOperation  # the operation it is of
    outputs: tuple[TensorUse, ...]  # made by it


def works(step: RecordedOperation) -> list[KernelWork]:
    """Return the kernels of an operation: one, or two for the backward of a convolution."""
    if step.name in _PRODUCTS:
        first, second = (step.given[index] for index in _PRODUCTS[step.name])
        return [_product(step, first, second)]
    if step.name == "convolution":
        return [_convolution(step)]
    if step.name == "convolution_backward":
        return _convolution_backward(step)
    if _attends(step.name):
        return [_attention(step)]
    return [KernelWork("memory", step.name, (), _moved(step), (), step, step.outputs)]


def is_dear(name: str) -> bool:
    """Return True if an operation of a forward is a matrix product, a convolution or an attention, by its name.

    Selective recompute keeps their results; all else is computed again.
    """
    return name in _PRODUCTS or name == "convolution" or _attends(name)


def _attends(name: str) -> bool:
    return name.removeprefix("_").startswith("scaled_dot_product")


def fusible(work: KernelWork) -> bool:
    """Return True if a compiler joins it with its neighbours: elementwise, norms and reductions."""
    return work.kind == "memory" and not any(word in work.name for word in _ALONE)


_PRODUCTS: dict[str, tuple[int, int]] = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "mv": (0, 1),
    "dot": (0, 1),
    "matmul": (0, 1),
    "addmm": (1, 2),
    "addmm_": (1, 2),
    "baddbmm": (1, 2),
    "addbmm": (1, 2),
    "addmv": (1, 2),
    "linear": (0, 1),
    "_scaled_mm": (0, 1),
    "_grouped_mm": (0, 1),
    "_scaled_grouped_mm": (0, 1),
}
_ALONE = (
    "embedding index gather scatter sort topk cumsum cumprod pool upsample grid_sampler unfold fft roll "
    "nonzero unique bincount histc multinomial _foreach"
).split()


def _product(step: RecordedOperation, first: TensorUse, second: TensorUse) -> KernelWork:
    left, right = first.shape, second.shape
    if step.name == "linear":
        right = (right[1], right[0])
    if len(left) == 1:
        left = (1, *left)
    if len(right) == 1:
        right = (*right, 1)
    batch, inner = 1, left[-1]
    if "grouped" in step.name and len(left) == len(right) == 2:
        # Groups share out what is summed over: each gives a product of its own.
        rows, columns = left[0], right[1]
    else:
        rows, columns = left[-2], right[-1]
        if "grouped" not in step.name:
            batch = prod(left[:-2])
            if len(right) == 2 and batch > 1:
                rows, batch = rows * batch, 1
    moved = first.elements + second.elements + sum(one.elements for one in step.outputs)
    dims = (float(batch), float(rows), float(columns), float(inner))
    return KernelWork("matmul", step.name, dims, moved, (first, second), step, step.outputs)


def _convolution(step: RecordedOperation) -> KernelWork:
    input, weight = step.given[0], step.given[1]
    dims = _as_product(input, weight, step.outputs[0], transposed=bool(step.given[6]))
    moved = input.elements + weight.elements + step.outputs[0].elements
    return KernelWork("convolution", step.name, dims, moved, (input, weight), step, step.outputs)


def _as_product(input: TensorUse, weight: TensorUse, output: TensorUse, *, transposed: bool) -> tuple[float, ...]:
    places = input if transposed else output
    rows = places.shape[0] * prod(places.shape[2:])
    if transposed:
        return (1.0, float(rows), float(prod(weight.shape[1:])), float(weight.shape[0]))
    return (1.0, float(rows), float(weight.shape[0]), float(prod(weight.shape[1:])))


def _convolution_backward(step: RecordedOperation) -> list[KernelWork]:
    grad, input, weight = step.given[:3]
    _, rows, columns, inner = _as_product(input, weight, grad, transposed=bool(step.given[7]))
    wanted, left = step.given[-1], list(step.outputs)
    found: list[KernelWork] = []
    if wanted[0]:
        made = left.pop(0)
        moved = grad.elements + weight.elements + made.elements
        dims = (1.0, rows, inner, columns)
        found.append(KernelWork("convolution", step.name, dims, moved, (grad, weight), step, (made,)))
    if wanted[1]:
        moved = grad.elements + input.elements + left[0].elements
        dims = (1.0, columns, inner, rows)
        found.append(KernelWork("convolution", step.name, dims, moved, (grad, input), step, tuple(left)))
    return found or [KernelWork("memory", step.name, (), _moved(step), (), step, step.outputs)]


def _attention(step: RecordedOperation) -> KernelWork:
    query, key, value = _first_four_dimensional(step)
    samples, heads, queries, width = query.shape[-4:]
    # A value may be of another width than a key: the two products then average.
    mean = (width + value.shape[-1]) / 2
    dims = (float(samples), float(heads), float(key.shape[-3]), float(queries), float(key.shape[-2]), float(mean))
    return KernelWork("attention", step.name, dims, _moved(step), (query, key, value), step, step.outputs)


def _first_four_dimensional(step: RecordedOperation) -> tuple[TensorUse, TensorUse, TensorUse]:
    tensors = [one for one in step.given if isinstance(one, TensorUse)]
    start = 1 if "backward" in step.name and step.name.startswith("_") else 0
    query, key, value = (_four(one) for one in tensors[start : start + 3])
    return query, key, value


def _four(one: TensorUse) -> TensorUse:
    shape = one.shape
    if len(shape) == 4:
        return one
    if len(shape) < 4:
        return TensorUse(one.memory, (1,) * (4 - len(shape)) + shape, one.floating)
    return TensorUse(one.memory, (prod(shape[:-3]), *shape[-3:]), one.floating)


def _moved(step: RecordedOperation) -> float:
    return _MOVED.get(step.name, _all_of_it)(step)


def _all_of_it(step: RecordedOperation) -> float:
    return sum(one.elements for one in step.inputs) + sum(one.elements for one in step.outputs)


def _what_is_looked_up(step: RecordedOperation) -> float:
    return 2 * step.outputs[0].elements + sum(one.elements for one in step.inputs[1:])


def _written_over(step: RecordedOperation) -> float:
    read = [one for one in step.inputs if one.memory != step.outputs[0].memory]
    return sum(one.elements for one in (*read, *step.outputs))


_MOVED: dict[str, Callable[[RecordedOperation], float]] = {
    "embedding": _what_is_looked_up,
    "index": _what_is_looked_up,
    "index_select": _what_is_looked_up,
    "gather": _what_is_looked_up,
    "copy_": _written_over,
    "fill_": _written_over,
    "zero_": _written_over,
}


ATTENTION, ATTENTION_BACKWARD = "scaled_dot_product_attention", "scaled_dot_product_attention_backward"


@contextmanager
def as_on_accelerators(recorder: OperationRecorder) -> Iterator[None]:
    """Record functions with fused kernels as these kernels."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **how: Any,  # scale and grouped heads change values, not costs
    ) -> Tensor:
        causal = is_causal or (attn_mask is not None and recorder.is_causal(attn_mask))
        settings = {"is_causal": is_causal, **how}
        return _FusedAttention.apply((recorder, causal, settings), query, key, value, attn_mask)  # pyrefly: ignore

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return torch.native_dropout(input, p, True)[0] if training and p > 0 else input

    def rms_norm(
        input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        return _RMSNorm.apply((recorder, normalized_shape, eps), input, weight)  # pyrefly: ignore

    replaced: dict[str, Callable[..., Any]] = {ATTENTION: attention, "dropout": dropout, "rms_norm": rms_norm}
    before = {name: getattr(F, name) for name in replaced}
    by_function: dict[Any, Callable[..., Any]] = {_ORIGINAL[name]: mine for name, mine in replaced.items()}
    by_function[torch.rms_norm] = rms_norm
    # Functions of torch.nn.functional that call others find them by name; callers elsewhere may hold the functions.
    for name, mine in replaced.items():
        setattr(F, name, mine)
    try:
        with _Instead(by_function):
            yield
    finally:
        for name, one in before.items():
            setattr(F, name, one)


_ORIGINAL = {name: getattr(F, name) for name in (ATTENTION, "dropout", "rms_norm")}


class _Instead(TorchFunctionMode):
    def __init__(self, replaced: dict[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._replaced = replaced

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called = self._replaced.get(func) or func
        return called(*args, **(kwargs or {}))


def _put_values(recorder: OperationRecorder, output: Tensor, name: str, *args: Any, **how: Any) -> None:
    """Compute into ``output`` if tensors have values: later shapes may depend on them."""
    if isinstance(output, FakeTensor) or output.device.type == "meta":
        return
    with recorder.paused(), torch.no_grad(), torch._C.DisableTorchFunction():
        output.copy_(_ORIGINAL[name](*args, **how))


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        how: tuple[OperationRecorder, bool, dict[str, Any]],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        recorder, causal, settings = how
        # As fused kernels lay it out: heads beside each other, so that joining them copies nothing.
        *lead, heads, queries, _ = query.shape if query.dim() > 2 else (1, *query.shape)
        output = query.new_empty((*lead, queries, heads, value.shape[-1])).transpose(-2, -3)
        output = output if query.dim() > 2 else output[0]
        _put_values(recorder, output, ATTENTION, query, key, value, mask, **settings)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.recorder, ctx.causal = recorder, causal
        ctx.save_for_backward(query, key, value, mask, output, sums)
        given = (recorder.see(query), recorder.see(key), recorder.see(value))
        recorder.add(
            ATTENTION,
            recorder.tensors_in((query, key, value, mask)),
            recorder.tensors_in((output, sums)),
            given=given,
            causal=causal,
        )
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        recorder: OperationRecorder = ctx.recorder
        query, key, value, mask, output, sums = ctx.saved_tensors
        made = [torch.empty_like(one) for one in (query, key, value)]
        mask_grad = torch.empty_like(mask) if mask is not None and ctx.needs_input_grad[4] else None
        read = recorder.tensors_in((query, key, value, mask, output, sums, grads))
        given = (recorder.see(query), recorder.see(key), recorder.see(value))
        recorder.add(ATTENTION_BACKWARD, read, recorder.tensors_in((made, mask_grad)), given=given, causal=ctx.causal)
        return None, *made, mask_grad


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, how: tuple[OperationRecorder, list[int], float | None], input: Tensor, weight: Tensor | None
    ) -> Tensor:
        recorder, shape, eps = how
        output = torch.empty_like(input)
        _put_values(recorder, output, "rms_norm", input, shape, weight, eps)
        scale = input.new_empty((*input.shape[:-1], 1), dtype=torch.float32)
        ctx.recorder = recorder
        ctx.save_for_backward(input, weight, scale)
        recorder.add("rms_norm", recorder.tensors_in((input, weight)), recorder.tensors_in((output, scale)))
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        recorder: OperationRecorder = ctx.recorder
        input, weight, scale = ctx.saved_tensors
        made = torch.empty_like(input)
        of_weight = None if weight is None else torch.empty_like(weight)
        read = recorder.tensors_in((input, weight, scale, grads))
        recorder.add("rms_norm_backward", read, recorder.tensors_in((made, of_weight)))
        return None, made, of_weight
