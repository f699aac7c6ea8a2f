"""What is Keras' own: its code, and what it keeps for the process, by the names that it has there."""

from __future__ import annotations

from typing import Any

CALL = "current_call_ctx"
"""The call of a layer that is under way."""

DEVICE = "torch_device"
"""The device that tensors are made on; a ``torch.device`` while a model runs under a plan."""

NAMES = "object_name_uids"
"""How many objects of each name there have been."""


def is_keras_code(given: Any) -> bool:
    """Return True if a class or a function is of Keras itself, and not of a user's."""
    return given.__module__.startswith("keras.")
