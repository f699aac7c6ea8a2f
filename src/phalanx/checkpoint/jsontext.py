"""JSON for ``state.json``: refuses, by name, what would not come back the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from phalanx.errors import CheckpointError


def to_json(value: Any, what: str) -> bytes:
    """``value`` as JSON text; floats are written so that they read back bit for bit, NaN and infinities as in Python.

    Raises:
        CheckpointError: names every part of ``value`` that is not JSON; ``what`` says what the value is.
    """
    wrong = list(not_json(value, ""))
    if wrong:
        raise CheckpointError(
            f"{what} can hold only JSON (dict with str keys, list, str, int, float, bool, None), not "
            + ", ".join(f"{kind} at {where or 'the top'}" for where, kind in wrong)
        )
    return (json.dumps(value, indent=1) + "\n").encode()


def not_json(value: Any, where: str) -> Iterator[tuple[str, str]]:
    """Where in ``value`` something stands that is not JSON, and its type."""
    if value is None or isinstance(value, bool | int | float | str):
        return
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from not_json(item, f"{where}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                yield f"{where}[{key!r}]", f"a key of type {type(key).__name__}"
            else:
                yield from not_json(item, f"{where}.{key}" if where else key)
    else:
        yield where, type(value).__name__
