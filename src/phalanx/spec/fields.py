"""Checks of a value's type that every spec shares: what stands in a field is of the type the field says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.errors import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What may stand in a field.

    Attributes:
        types: of its values. ``float`` takes whole numbers, too; neither takes ``True`` and ``False``.
        allowed: the same in words.
        fix: a line to copy that would work.
    """

    types: tuple[type, ...]
    allowed: str
    fix: str

    def holds(self, value: object) -> bool:
        """Whether ``value`` may stand there."""
        if isinstance(value, bool):
            return bool in self.types
        return isinstance(value, self.types) or (isinstance(value, int) and float in self.types)


def misfits(where: str, values: Mapping[str, object], kinds: Mapping[str, Kind]) -> list[Problem]:
    """A problem for each entry of ``values`` that is not of its kind.

    Args:
        where: what the fields belong to, such as ``run``.
        values: by name; those that no kind is named for are not looked at.
        kinds: by the same names.
    """
    return [
        Problem(where=f"{where}.{name}", given=repr(values[name]), allowed=kind.allowed, fix=kind.fix)
        for name, kind in kinds.items()
        if name in values and not kind.holds(values[name])
    ]


def is_whole(value: object, least: int) -> bool:
    """Whether ``value`` is a whole number, ``least`` or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> bool:
    """Whether ``value`` is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
