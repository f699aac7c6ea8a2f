"""Keras' own code and global state, by Keras' names."""

from __future__ import annotations

from typing import Any

CALL = "current_call_ctx"
"""The call of a layer that is under way."""

DEVICE = "torch_device"
"""The device that tensors are made on; a ``torch.device`` while a model runs under a plan."""

NAMES = "object_name_uids"
"""How many objects of each name there have been."""


def is_keras_code(given: Any) -> bool:
    """Return True if a class or a function is Keras' own, and not a user's."""
    return given.__module__.startswith("keras.")
