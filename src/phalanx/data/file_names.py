"""Names of data files: lists and patterns of them, resolved."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from typing import Any

from phalanx.errors import SpecError

Names = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def file_paths(files: Names, where: str, fix: str) -> list[str]:
    """Return every file named by a name, a pattern, or a list of both. A pattern's files are sorted by name.

    ``where``, the place in the user's code, and ``fix``, a line that works, are for the errors.

    Raises:
        SpecError: if there is none, or one is named twice.
    """

    def problem(given: str, allowed: str) -> SpecError:
        return SpecError.of(where, given, allowed, fix)

    names: list[Any] = [files] if isinstance(files, str | os.PathLike) or not isinstance(files, Iterable) else [*files]
    found: list[str] = []
    for name in names:
        if not isinstance(name, str | os.PathLike):
            raise problem(repr(name), "names of files, or patterns of them")
        path = os.fspath(name)
        there = [path] if os.path.isfile(path) else sorted(filter(os.path.isfile, glob.glob(path)))
        if not there:
            raise problem(f"{path}, where no file is", "files that are there")
        found += there
    if not found:
        raise problem("an empty list", "one file or more")
    if twice := sorted({path for path in found if found.count(path) > 1}):
        raise problem(f"{twice[0]} twice", "each file once")
    return found
