"""Patterns of names of a model: which tensors an option is for, ``*`` standing for any text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

from phalanx.errors import Problem


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Return True if one of the ``patterns`` fits ``name``."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def last_that_fits(name: str, patterns: Iterable[str]) -> str | None:
    """The pattern that counts for ``name`` where several may fit it."""
    return next((pattern for pattern in reversed(list(patterns)) if fnmatchcase(name, pattern)), None)


def fits_nothing(where: str, pattern: str, names: Iterable[str], *, kind: str, fix: Callable[[str], str]) -> Problem:
    """The problem that ``pattern`` fits none of ``names``, with those near it.

    Args:
        where: the field that has the pattern.
        kind: what the names are of, in words.
        fix: gives the line to copy for a pattern that fits something, or for ``*`` where there are no names.
    """
    full = list(dict.fromkeys(names))
    layers = dict.fromkeys(f"{name.partition('.')[0]}.*" for name in full if "." in name)
    near = get_close_matches(pattern, [*full, *layers], n=3, cutoff=0.0)
    return Problem(
        where=where,
        given=f"the pattern {pattern!r}, which fits no {kind}",
        allowed=f"full names, * standing for any text; near are {', '.join(near) or 'none'}",
        fix=fix((near or ["*"])[0]),
    )
