"""Functions that accelerators run as one kernel and the CPU does not, recorded as they run there.

Inside ``as_on_accelerators`` attention, dropout and RMS norm are one operation forward and one backward, and keep what
their fused kernels keep: attention the sums of its softmax instead of its scores, dropout a mask of one byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from phalanx.profile.recorder import Recorder

ATTENTION, ATTENTION_BACKWARD = "scaled_dot_product_attention", "scaled_dot_product_attention_backward"


@contextmanager
def as_on_accelerators(recorder: Recorder) -> Iterator[None]:
    """Inside, functions with fused kernels are recorded as these."""

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
        return _Attention.apply((recorder, causal, settings), query, key, value, attn_mask)  # pyright: ignore[reportReturnType]

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return torch.native_dropout(input, p, True)[0] if training and p > 0 else input

    def rms_norm(
        input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        return _RMSNorm.apply((recorder, normalized_shape, eps), input, weight)  # pyright: ignore[reportReturnType]

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


def _put_values(recorder: Recorder, output: Tensor, name: str, *args: Any, **how: Any) -> None:
    """Compute into ``output`` where tensors have values: what comes after may have shapes that depend on them."""
    if isinstance(output, FakeTensor) or output.device.type == "meta":
        return
    with recorder.paused(), torch.no_grad(), torch._C.DisableTorchFunction():
        output.copy_(_ORIGINAL[name](*args, **how))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        how: tuple[Recorder, bool, dict[str, Any]],
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
            recorder.seen((query, key, value, mask)),
            recorder.seen((output, sums)),
            given=given,
            causal=causal,
        )
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        recorder: Recorder = ctx.recorder
        query, key, value, mask, output, sums = ctx.saved_tensors
        made = [torch.empty_like(one) for one in (query, key, value)]
        mask_grad = torch.empty_like(mask) if mask is not None and ctx.needs_input_grad[4] else None
        read = recorder.seen((query, key, value, mask, output, sums, grads))
        given = (recorder.see(query), recorder.see(key), recorder.see(value))
        recorder.add(ATTENTION_BACKWARD, read, recorder.seen((made, mask_grad)), given=given, causal=ctx.causal)
        return None, *made, mask_grad


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, how: tuple[Recorder, list[int], float | None], input: Tensor, weight: Tensor | None
    ) -> Tensor:
        recorder, shape, eps = how
        output = torch.empty_like(input)
        _put_values(recorder, output, "rms_norm", input, shape, weight, eps)
        scale = input.new_empty((*input.shape[:-1], 1), dtype=torch.float32)
        ctx.recorder = recorder
        ctx.save_for_backward(input, weight, scale)
        recorder.add("rms_norm", recorder.seen((input, weight)), recorder.seen((output, scale)))
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        recorder: Recorder = ctx.recorder
        input, weight, scale = ctx.saved_tensors
        made = torch.empty_like(input)
        of_weight = None if weight is None else torch.empty_like(weight)
        read = recorder.seen((input, weight, scale, grads))
        recorder.add("rms_norm_backward", read, recorder.seen((made, of_weight)))
        return None, made, of_weight
