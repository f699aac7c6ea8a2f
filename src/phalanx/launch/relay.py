"""What workers print, passed on by the launcher.

Everything goes through the launcher's ``sys.stdout`` and ``sys.stderr``, so that it never tears a progress bar that is
drawn there. Rank 0 passes through as it is; the lines of the others begin with ``[rank 1]``.
"""

from __future__ import annotations

import codecs
import sys
from typing import Literal, final

_LONGEST_LINE = 65536


@final
class Relay:
    """One stream of one worker."""

    def __init__(self, rank: int, stream: Literal["stdout", "stderr"]) -> None:
        self._prefix = f"[rank {rank}] " if rank else ""
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._line = ""

    def feed(self, data: bytes) -> None:
        """Pass on what has come: at once for rank 0, in whole lines for the others."""
        text = self._decoder.decode(data)
        if not self._prefix:
            self._write(text)
            return
        *whole, self._line = (self._line + text).split("\n")
        if len(self._line) > _LONGEST_LINE:
            whole, self._line = [*whole, self._line], ""
        if whole:
            self._write("".join(f"{self._prefix}{line}\n" for line in whole))

    def close(self) -> None:
        """Pass on an unfinished last line."""
        if self._line:
            self._write(f"{self._prefix}{self._line}\n")
            self._line = ""

    def _write(self, text: str) -> None:
        # looked up each time: a progress bar replaces sys.stdout while it lives
        target = sys.stdout if self._stream == "stdout" else sys.stderr
        if target is None or not text:  # pyright: ignore[reportUnnecessaryComparison]
            return
        try:
            target.write(text)
        except UnicodeEncodeError:
            target.write(text.encode("ascii", "backslashreplace").decode("ascii"))
        target.flush()
