"""Stacks of Python, as ``faulthandler`` and tracebacks write them or a living thread has them, and whose code it is."""

from __future__ import annotations

import re
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Literal

_LIBRARY = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")})
_OURS = str(Path(__file__).parents[1])
_TORCH = re.compile(r"[/\\]torch[/\\]")
_DEPTH = 40


@dataclass(frozen=True, slots=True)
class StackFrame:
    """One line of a stack: where a function stands."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{_short(self.file)}:{self.line} {self.function}"

    @property
    def by(self) -> Literal["user", "phalanx", "torch", "library"]:
        """Whose code it is."""
        if self.file.startswith(_OURS) and not self.file.startswith(f"{_OURS}/demo"):
            return "phalanx"
        if _TORCH.search(self.file):
            return "torch"
        return "library" if self.file.startswith((*_LIBRARY, "<")) else "user"


def frames_of(frame: FrameType | None) -> tuple[StackFrame, ...]:
    """The frames from ``frame`` outward, as many as tell something."""
    found: list[StackFrame] = []
    while frame is not None and len(found) < _DEPTH:
        # another thread may be between two lines, at an instruction that belongs to none
        line: int | None = frame.f_lineno
        found.append(StackFrame(frame.f_code.co_filename, line or frame.f_code.co_firstlineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(found)


def parse_stacks(text: str) -> tuple[StackFrame, ...]:
    """The frames of the main thread in the last dump of ``faulthandler``; empty where there are none.

    It is the one that took the signal, and where that is none of Python's, the last: the first there was.
    """
    parts = _THREAD.split(text)  # what stood before; then of each thread its title and its lines
    threads = [(title, _frames(lines)) for title, lines in zip(parts[1::2], parts[2::2], strict=True)]
    signalled = [frames for title, frames in threads if title.startswith("Current") and frames]
    return (signalled or [frames for _, frames in threads] or [()])[-1]


_THREAD = re.compile(r"^((?:Current thread|Thread) .*)$", re.MULTILINE)
_FRAME = re.compile(r'^ +File "(.*)", line (\d+),? in (.*)$', re.MULTILINE)


def parse_traceback(text: str) -> tuple[StackFrame, ...]:
    """The frames of an exception's traceback, the innermost first."""
    return _frames(text)[::-1]


def _frames(text: str) -> tuple[StackFrame, ...]:
    return tuple(StackFrame(file, int(line), function) for file, line, function in _FRAME.findall(text))


@cache
def _short(file: str) -> str:
    """A path from the package on, or the last two parts."""
    for part in ("/torch/", "/phalanx/"):
        if part in file:
            return part.strip("/") + "/" + file.rpartition(part)[2]
    return "/".join(Path(file).parts[-2:])
