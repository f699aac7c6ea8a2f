"""The place of a sample in data of several parts, one behind the other: files, row groups, sources."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import numpy as np


@final
class PartIndex:
    """Parts with so many samples each; the first begins with sample 0."""

    def __init__(self, sizes: Iterable[int], what: str = "sample") -> None:
        """Take the sizes; ``what`` is the word for a sample in messages."""
        self._ends, self._what = np.cumsum(list(sizes)), what

    def __len__(self) -> int:
        """Return the samples of all parts."""
        return int(self._ends[-1])

    def places(self, part: int) -> range:
        """Return the global sample numbers of this part."""
        return range(int(self._ends[part - 1]) if part else 0, int(self._ends[part]))

    def locate(self, index: int, *, from_end: bool = False) -> tuple[int, int]:
        """Return the part that holds sample ``index``, and its place there; ``from_end`` allows negative indices.

        Raises:
            IndexError: if there is no such sample.
        """
        if not (-len(self) if from_end else 0) <= index < len(self):
            raise IndexError(f"{self._what} {index} of {len(self)}")
        index = int(index) % len(self)
        part = int(np.searchsorted(self._ends, index, side="right"))
        return part, index - self.places(part).start
