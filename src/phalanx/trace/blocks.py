"""A model's repeated blocks: found, compared by cost, and replaced by stubs while the rest is traced."""

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
    """Return the outermost repeated blocks, in module order; empty if the model has none.

    A block is a child of a ``ModuleList``, or a child of a ``Sequential`` or of a ``ModuleDict`` of modules of one kind
    that itself is made of several modules (a residual block, not a single convolution). Blocks inside blocks are not
    listed. A module that is never called, a container without ``forward`` or one passed to ``open_up``, is no block:
    its children are.
    """
    found: list[nn.Module] = []
    _collect(module, found)
    return found


def parts(module: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks, or else the children with parameters that are called themselves."""
    return blocks(module) or [part for child in module.children() for part in _called(child)]


def can_be_called(module: nn.Module) -> bool:
    """Return True if it has a ``forward``, and is not known to be bypassed by a model."""
    return type(module).forward is not nn.Module.forward and module not in _opened


def open_up(modules: Iterable[nn.Module]) -> None:
    """Mark these as containers: the model calls their children, not them."""
    _opened.update(modules)


def _called(module: nn.Module) -> list[nn.Module]:
    if next(module.parameters(), None) is None:
        return []
    if can_be_called(module):
        return [module]
    return [part for child in module.children() for part in _called(child)]


def leave_cache_out(module: nn.Module) -> None:
    """Switch off the cache of keys and values of transformers' models; training does not read it."""
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
    """Return a key shared by blocks of equal cost.

    Settings are numbers, words and tuples of these that modules hold as attributes. Integers called an index do not
    count, and for fractions (a rate of dropout) only whether they are zero.
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
    """A value that is not a tensor."""

    value: Any


Spec = int | MadeTensor | NotTensor
"""One leaf of what a block gives; a number where it is that tensor of those it was given."""


def spec(value: Any, inputs: list[Tensor]) -> Spec:
    """Return the form of one leaf of a block's output, for a call with ``inputs``."""
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
    """A stand-in for a block: tensors in the forms of its output, and gradients of its inputs; ``back`` is called."""

    @staticmethod
    def forward(
        ctx: Any, recorder: OperationRecorder, back: Any, made: list[MadeTensor], anchor: Tensor, *floats: Tensor
    ) -> Any:
        """Return stand-ins for the block's output."""
        ctx.recorder, ctx.back, ctx.forms = recorder, back, [(one.shape, one.dtype) for one in floats]
        results = tuple(torch.empty_strided(one.shape, one.stride, dtype=one.dtype) for one in made)
        ctx.mark_non_differentiable(*(one for one in results if not one.is_floating_point()))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return stand-ins for the gradients of the block's inputs."""
        ctx.back(grads)
        with ctx.recorder.paused():
            return None, None, None, None, *(torch.empty(shape, dtype=dtype) for shape, dtype in ctx.forms)


class Entered(torch.autograd.Function):
    """The input of a block: not a leaf, so that the block may write into it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """Return a copy of the same form, with the values if there are some."""
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        return made.copy_(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradient unchanged."""
        return grads[0]
