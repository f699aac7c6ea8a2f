"""Stacks of Python, as ``faulthandler`` and tracebacks write them or a living thread has them, and whose code it is."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, chain, repeat, takewhile
from operator import attrgetter, call, itemgetter
from pathlib import Path
from typing import Any, Literal

from phalanx.train.user_traceback import origin

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
        return origin(self.file)


def frames_of_thread(ident: int) -> tuple[StackFrame, ...]:
    """Where the thread ``ident`` of this process stands, the innermost frame first; empty where that cannot be told.

    The frames are followed in one call of compiled code, during which no other thread runs. Garbage is not collected in
    it: until Python 3.11 to make the object of a frame may begin a collection, whose finalizers let the other thread
    run on, out of that very frame. What is read of it then is freed memory.
    """
    inner = map(itemgetter(ident), map(call, (sys._current_frames,)))
    outward = takewhile(bool, accumulate(chain(inner, repeat("f_back", _DEPTH - 1)), getattr))
    places = map(_PLACE, chain.from_iterable(map(call, (partial(tuple, outward),))))
    collects = gc.isenabled()
    calls: list[Callable[[], Any]] = [gc.disable, partial(tuple, places), gc.enable if collects else gc.isenabled]
    try:
        _, found, _ = map(call, calls)
    except Exception:
        if collects:
            gc.enable()
        return ()
    # A thread may be between two lines, at an instruction that belongs to none.
    return tuple(StackFrame(file, line or first, function) for file, line, first, function in found)


_PLACE = attrgetter("f_code.co_filename", "f_lineno", "f_code.co_firstlineno", "f_code.co_name")


def parse_stacks(text: str) -> tuple[StackFrame, ...]:
    """The frames of the main thread in the last dump of ``faulthandler``; empty where there are none.

    It is the one that took the signal, and where that is none of Python's, the last: the first there was.
    """
    parts = _THREAD.split(text)  # what stood before; then of each thread its title and its lines
    threads = [(title, _frames(lines)) for title, lines in zip(parts[1::2], parts[2::2], strict=True)]
    signalled = [frames for title, frames in threads if title.startswith(("Current", "Stack")) and frames]
    return (signalled or [frames for _, frames in threads] or [()])[-1]


_THREAD = re.compile(r"^((?:Current thread|Thread|Stack) .*)$", re.MULTILINE)
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
