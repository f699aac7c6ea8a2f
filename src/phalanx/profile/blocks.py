"""Finds a model's repeated blocks: what is profiled, sharded, recomputed and compiled as one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from torch import nn

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
    """Whether it has a ``forward``, and is not known to be left alone by a model that calls what is inside."""
    return type(module).forward is not nn.Module.forward and module not in _opened


def open_up(modules: Iterable[nn.Module]) -> None:
    """From now on these are containers: the model calls what is inside them, not them."""
    _opened.update(modules)


def _called(module: nn.Module) -> list[nn.Module]:
    """The module, or what in it has parameters and is called."""
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
    """The children of a container that are blocks, of which there are at least two."""
    members: list[nn.Module] = []
    if isinstance(container, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        members = [member for member in container.children() if _is_block(member, container)]
    alike = len({type(member) for member in members}) == 1 or not isinstance(container, nn.ModuleDict)
    return members if len(members) >= 2 and alike else []


def _is_block(member: nn.Module, container: nn.Module) -> bool:
    if next(member.parameters(), None) is None:
        return False
    return isinstance(container, nn.ModuleList) or any(True for _ in member.children())
