"""Uneven shares of a global batch: the text of a plan's ``shares``, and how many samples each weight comes to."""

from __future__ import annotations

import re
from collections.abc import Sequence

AUTO = "auto"
"""The text of shares that follow the speed of each device."""


def weights(text: str) -> tuple[int, ...]:
    """The weights that a text such as ``3,1`` gives to the ranks of ``dp``; none for ``auto`` and for the empty text.

    Raises:
        ValueError: if it is none of these.
    """
    if text in ("", AUTO):
        return ()
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ValueError(f"{text!r} is neither auto nor whole numbers joined by commas, such as 3,1")
    return tuple(int(word) for word in text.split(","))


def dealt(total: int, each: Sequence[float]) -> tuple[int, ...]:
    """``total`` samples dealt out in proportion to the weights ``each``: the largest remainders are rounded up.

    Of equal remainders the first is rounded up, so that equal weights get what even shares are: 7 over 1, 1 is 4, 3.

    Raises:
        ValueError: if the weights add up to nothing.
    """
    whole = sum(each)
    if whole <= 0:
        raise ValueError("weights that add up to nothing")
    parts = [total * one / whole for one in each]
    counts = [int(part + 1e-9) for part in parts]
    late = sorted(range(len(each)), key=lambda at: (-round(parts[at] - counts[at], 9), at))
    for at in late[: total - sum(counts)]:
        counts[at] += 1
    return tuple(counts)
