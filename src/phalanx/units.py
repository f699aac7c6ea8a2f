"""Printing and parsing of bytes, seconds, counts and lists of names. GiB is 2**30 bytes, GB is 10**9."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

DURATION_UNITS = "s, m, h or d"
"""What a time that ``parse_duration`` reads may be given in, for messages."""

_BYTES = {"b": 1, **{f"{unit}b": 1000**power for power, unit in enumerate("kmgt", 1)}}
_BYTES |= {f"{unit}ib": 1024**power for power, unit in enumerate("kmgt", 1)}
_DURATIONS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_bytes(text: str) -> int:
    """Return bytes from text such as ``80GB``, ``512 MiB`` or ``1024``.

    Raises:
        ValueError: if the text is no number with a known unit.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", text)
    unit = (match.group(2) or "b").lower() if match else ""
    if match is None or unit not in _BYTES:
        raise ValueError(f"{text!r} is no size in bytes; write a number and one of B, KB, MB, GB, KiB, MiB, GiB")
    return round(float(match.group(1)) * _BYTES[unit])


def parse_duration(text: str) -> float:
    """Return seconds, more than 0, from text such as ``90s``, ``15m``, ``1.5h`` or ``3d``.

    Raises:
        ValueError: if the text is no finite number above 0 with a known unit.
    """
    number, unit = text.strip()[:-1], text.strip()[-1:]
    try:
        seconds = float(number) * _DURATIONS[unit]
    except (ValueError, KeyError):
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(f"a time above 0 in {DURATION_UNITS}, such as 15m")
    return seconds


def show_bytes(count: float) -> str:
    """Return ``1.5 KiB`` for ``1536``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def show_seconds(seconds: float) -> str:
    """Return ``1.53 ms`` for ``0.00153``, ``1:35`` for ``95``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    return show_clock(seconds)


def show_clock(seconds: float) -> str:
    """Return ``1:35`` for ``95``, ``1:02:05`` for ``3725``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def show_count(count: float) -> str:
    """Return ``1.23 M`` for ``1234567``."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.3g}"


def show_number(number: float) -> str:
    """Return a number with three significant digits, without an exponent from 0.0001 on: ``1,650``."""
    return f"{float(f'{number:.3g}'):,.15g}" if number == 0 or abs(number) >= 1e-4 else f"{number:.3g}"


def show_counted(number: float, noun: str) -> str:
    """Return ``1 node``, ``2 processes``, ``0.5 GPUs``."""
    text = f"{int(number)}" if number == int(number) else f"{number:g}"
    return f"{text} {noun}" if number == 1 else f"{text} {noun}{'es' if noun.endswith('s') else 's'}"


def show_names(names: Sequence[str], most: int = 3) -> str:
    """Return the first ``most`` names and the number of further ones: ``a, b, c and 4 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


_STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""Return ``text`` with everything that would steer a terminal or a page shown as an escape, such as ``\x1b``.

    These are control characters except for the end of a line and a tab, marks that turn the direction of writing, and
    characters that no encoding knows. The same object is returned if there is none.
    """
    return text if _STEERS.search(text) is None else _STEERS.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
