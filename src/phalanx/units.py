"""Printing and parsing of bytes, seconds, counts and lists of names. GiB is 2**30 bytes, GB is 10**9."""

from __future__ import annotations

import re
from collections.abc import Sequence

_BYTES = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_bytes(text: str) -> int:
    """Bytes from text such as ``80GB``, ``512 MiB`` or ``1024``.

    Raises:
        ValueError: if the text is no number with a known unit.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", text)
    unit = (match.group(2) or "b").lower() if match else ""
    if match is None or unit not in _BYTES:
        raise ValueError(f"{text!r} is no size in bytes; write a number and one of B, KB, MB, GB, KiB, MiB, GiB")
    return round(float(match.group(1)) * _BYTES[unit])


def show_bytes(count: float) -> str:
    """``1536`` → ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def show_seconds(seconds: float) -> str:
    """``0.00153`` → ``1.53 ms``; ``95`` → ``1:35``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def show_count(count: float) -> str:
    """``1234567`` → ``1.23 M``."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g}"


def show_names(names: Sequence[str], most: int = 3) -> str:
    """The first ``most`` names and how many more there are: ``a, b, c and 4 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
