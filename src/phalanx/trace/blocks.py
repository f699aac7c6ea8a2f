"""A model's repeated blocks: found, told which cost the same, and stood in for while the rest is traced."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from phalanx.trace.operation_recorder import OperationRecorder

_opened: WeakSet[nn.Module] = WeakSet()


def blocks(module: nn.Module) -> list[nn.Module]:
    """The outermost repeated blocks, in module order; empty where the model has none.

    A block is a child of a ``ModuleList``, or a child of a ``Sequential`` or of a ``ModuleDict`` of modules of one kind
    that itself is made of several modules (a residual block, not a single convolution). Blocks inside blocks are not
    listed. What is never called, a container without ``forward`` or what ``open_up`` was told of, is no block: what is
    inside it is.
    """
    found: list[nn.Module] = []
    _collect(module, found)
    return found


def parts(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks; of a model without, its children that have parameters and are called themselves."""
    return blocks(module) or [part for child in module.children() for part in _called(child)]


def can_be_called(module: nn.Module) -> bool:
    """Return True if it has a ``forward``, and is not known to be left alone by a model that calls what is inside."""
    return type(module).forward is not nn.Module.forward and module not in _opened


def open_up(modules: Iterable[nn.Module]) -> None:
    """From now on these are containers: the model calls what is inside them, not them."""
    _opened.update(modules)


def _called(module: nn.Module) -> list[nn.Module]:
    if next(module.parameters(), None) is None:
        return []
    if can_be_called(module):
        return [module]
    return [part for child in module.children() for part in _called(child)]


def leave_cache_out(module: nn.Module) -> None:
    """Switch off the cache of keys and values that transformers' models keep by default; training does not read it."""
    for child in module.modules():
        config: Any = getattr(child, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False


def _collect(module: nn.Module, found: list[nn.Module]) -> None:
    for child in module.children():
        members = _blocks_in(child)
        found += [part for member in members for part in _called(member) if part not in found]
        for rest in child.children() if members else [child]:
            if rest not in members:
                _collect(rest, found)


def _blocks_in(container: nn.Module) -> list[nn.Module]:
    members: list[nn.Module] = []
    if isinstance(container, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        members = [member for member in container.children() if _is_block(member, container)]
    alike = len({type(member) for member in members}) == 1 or not isinstance(container, nn.ModuleDict)
    return members if len(members) >= 2 and alike else []


def _is_block(member: nn.Module, container: nn.Module) -> bool:
    if next(member.parameters(), None) is None:
        return False
    return isinstance(container, nn.ModuleList) or any(True for _ in member.children())


def likeness(block: nn.Module) -> tuple[Any, ...]:
    """What blocks that cost the same have in common.

    Settings are numbers, words and tuples of these that modules hold as attributes. Whole numbers called an index do
    not count, and of fractions (a rate of dropout) only whether they are zero.
    """
    return tuple(
        (
            name,
            type(child).__qualname__,
            _settings(child),
            tuple(
                (key, tuple(one.shape), one.dtype, one.requires_grad)
                for key, one in child._parameters.items()
                if one is not None
            ),
        )
        for name, child in block.named_modules()
    )


def _settings(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    found: list[tuple[str, Any]] = []
    for name, value in vars(module).items():
        if name.startswith("_") or name == "training" or any(word in name for word in _PLACES):
            continue
        if isinstance(value, float):
            found.append((name, value != 0.0))
        elif isinstance(value, bool | int | str | None):
            found.append((name, value))
        elif isinstance(value, list | tuple) and all(isinstance(one, bool | int | str) for one in value):
            found.append((name, tuple(value)))
    return tuple(sorted(found, key=lambda pair: pair[0]))


_PLACES = ("idx", "index", "layer_id", "layer_number", "depth")


@dataclass(frozen=True, slots=True)
class MadeTensor:
    """A tensor that the block makes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class NotTensor:
    """What is no tensor."""

    value: Any


Spec = int | MadeTensor | NotTensor
"""One leaf of what a block gives; a number where it is that tensor of those it was given."""


def spec(value: Any, inputs: list[Tensor]) -> Spec:
    """The form of one leaf of what a block gives, called with ``inputs``."""
    if not isinstance(value, Tensor):
        return NotTensor(value)
    for index, one in enumerate(inputs):
        if one is value:
            return index
    return MadeTensor(tuple(value.shape), tuple(value.stride()), value.dtype)


def among(value: Tensor, tensors: list[Tensor]) -> bool:
    """Return True if it is one of them."""
    return any(one is value for one in tensors)


class Stub(torch.autograd.Function):
    """A block: tensors of the forms that it makes, and gradients of those that it was given; ``back`` is told."""

    @staticmethod
    def forward(
        ctx: Any, recorder: OperationRecorder, back: Any, made: list[MadeTensor], anchor: Tensor, *floats: Tensor
    ) -> Any:
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
