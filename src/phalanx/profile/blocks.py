"""Finds a model's repeated blocks: what is profiled, sharded, recomputed and compiled as one."""

from __future__ import annotations

from typing import Any

from torch import nn


def blocks(module: nn.Module) -> list[nn.Module]:
    """The outermost repeated blocks, in module order; empty where the model has none.

    A block is a child of a ``ModuleList``, or a child of a ``Sequential`` that itself is made of several modules
    (a residual block, not a single convolution). Blocks inside blocks are not listed.
    """
    found: list[nn.Module] = []
    _collect(module, found)
    return found


def parts(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks; of a model without, its children that have parameters and are called themselves."""
    return blocks(module) or _called(module)


def _called(module: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            found += _called(child)
        elif next(child.parameters(), None) is not None:
            found.append(child)
    return found


def leave_cache_out(module: nn.Module) -> None:
    """Switch off the cache of keys and values that transformers' models keep by default; training does not read it."""
    for child in module.modules():
        config: Any = getattr(child, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False


def _collect(module: nn.Module, found: list[nn.Module]) -> None:
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            members = [member for member in child if _is_block(member, child)]
            if len(members) >= 2:
                found += members
                for member in child:
                    if member not in members:
                        _collect(member, found)
                continue
        _collect(child, found)


def _is_block(member: nn.Module, container: nn.Module) -> bool:
    if next(member.parameters(), None) is None:
        return False
    return isinstance(container, nn.ModuleList) or any(True for _ in member.children())
