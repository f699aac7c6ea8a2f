"""Tells which blocks cost the same: of the same modules, settings and parameters."""

from __future__ import annotations

from typing import Any

from torch import nn


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
