"""Sections of a checkpoint: the part of a tensor's name before the dot, as in ``model.head.weight``.

Values of a section that are not tensors are in ``state.json`` under the same word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

MODEL = "model"
"""Parameters and persistent buffers, by the names that they have in the model."""
AVERAGE = "average"
"""The average of the weights, and buffers as of it, by the names that they have in the model."""
OPTIMIZER = "optimizer"
"""State of the optimizer: ``optimizer.<parameter>.<key>``."""
OUTER = "outer"
"""The outer momentum of DiLoCo, by parameters; ``state.json`` says whether there was one."""
SENDER = "sender"
"""What compression left out of gradients so far; ``state.json`` says how they were sent."""

FROZEN = "frozen"
"""In ``state.json`` alone: the fingerprint of each parameter that is not in the checkpoint; null where all are."""

_Value = TypeVar("_Value")


def name_in(section: str, name: str) -> str:
    """Return the checkpoint's name for ``name`` in ``section``."""
    return f"{section}.{name}"


def put_in(section: str, values: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return ``values`` by their names in a checkpoint."""
    return {name_in(section, name): value for name, value in values.items()}


def names_of(section: str, names: Iterable[str]) -> dict[str, str]:
    """Map name in ``section`` to name in the checkpoint, for those of ``names`` in that section."""
    start = name_in(section, "")
    return {name.removeprefix(start): name for name in names if name.startswith(start)}


def take_out(section: str, values: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return the entries of ``values`` in ``section``, by their names in that section."""
    return {own: values[name] for own, name in names_of(section, values).items()}
