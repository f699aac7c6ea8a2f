"""What stands for a block while what is around the blocks is traced, and the form of what a block gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.profile.recorder import Recorder


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that the block makes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Plain:
    """What is no tensor."""

    value: Any


Spec = int | Made | Plain
"""One leaf of what a block gives; a number where it is that tensor of those it was given."""


def spec(value: Any, inputs: list[Tensor]) -> Spec:
    """The form of one leaf of what a block gives, called with ``inputs``."""
    if not isinstance(value, Tensor):
        return Plain(value)
    for index, one in enumerate(inputs):
        if one is value:
            return index
    return Made(tuple(value.shape), tuple(value.stride()), value.dtype)


def among(value: Tensor, tensors: list[Tensor]) -> bool:
    """Whether it is one of them."""
    return any(one is value for one in tensors)


class Stub(torch.autograd.Function):
    """A block: tensors of the forms that it makes, and gradients of those that it was given; ``back`` is told."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, back: Any, made: list[Made], anchor: Tensor, *floats: Tensor) -> Any:
        """Stand-ins for what the block makes."""
        ctx.recorder, ctx.back, ctx.forms = recorder, back, [(one.shape, one.dtype) for one in floats]
        results = tuple(torch.empty_strided(one.shape, one.stride, dtype=one.dtype) for one in made)
        ctx.mark_non_differentiable(*(one for one in results if not one.is_floating_point()))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Stand-ins for the gradients of what the block was given."""
        ctx.back(grads)
        with ctx.recorder.paused():
            return None, None, None, None, *(torch.empty(shape, dtype=dtype) for shape, dtype in ctx.forms)


class Entered(torch.autograd.Function):
    """What enters a block: no leaf, so that the block may write into it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """The same form, and the same values where there are some."""
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        return made.copy_(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradient as it comes."""
        return grads[0]
