"""Tracebacks shortened to a user's own code, without the frames of Phalanx and PyTorch around it."""

from __future__ import annotations

import os
import sysconfig
import traceback
from importlib.util import find_spec
from pathlib import Path
from traceback import FrameSummary, TracebackException
from typing import Literal

_LIBRARY = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")})
_PHALANX = f"{Path(__file__).parents[1]}{os.sep}"
_TORCH = f"{Path(str(getattr(find_spec('torch'), 'origin', ''))).parent}{os.sep}"
_MODULE_CALL = ("_wrapped_call_impl", "_call_impl", "inner")  # of torch.nn.Module: up to three frames a module
_CAUSED = "\nThe above exception was the direct cause of the following exception:\n\n"
_MEANWHILE = "\nDuring handling of the above exception, another exception occurred:\n\n"


def origin(file: str) -> Literal["user", "phalanx", "torch", "library"]:
    """Return the owner of a file; the demonstration's jobs and cells of a notebook count as a user's."""
    if file.startswith(_PHALANX) and not file.startswith(f"{_PHALANX}demo"):
        return "phalanx"
    if file.startswith(_TORCH):
        return "torch"
    return "library" if file.startswith((*_LIBRARY, "<")) and not file.startswith("<ipython") else "user"


def users_frames(error: BaseException) -> list[FrameSummary]:
    """Return the frames of ``error`` in users' files, the outermost first."""
    return [frame for frame in traceback.extract_tb(error.__traceback__) if origin(frame.filename) == "user"]


def format_for_user(error: BaseException) -> str:
    """Return the traceback of ``error`` from its first frame in a user's file on, and the number of hidden frames.

    Frames of Phalanx between two of the user's are hidden, too, and those by which a module calls its ``forward``. An
    error without a frame of a user is a fault of Phalanx or of PyTorch, and is shown whole. Its cause and context are
    shortened in the same way.
    """
    return _text(TracebackException.from_exception(error))


def _text(one: TracebackException) -> str:
    earlier = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    before = "" if earlier is None else _text(earlier) + (_CAUSED if one.__cause__ else _MEANWHILE)
    gone = _shorten(one)
    heading, *lines = one.format(chain=False)
    note = f"  ({gone} frames of Phalanx and PyTorch are left out)\n" if gone else ""
    return before + heading + note + "".join(lines)


def _shorten(one: TracebackException) -> int:
    frames = list(one.stack)
    users = [index for index, frame in enumerate(frames) if origin(frame.filename) == "user"]
    if not users:
        return 0
    first, last = users[0], users[-1]
    between = [frame for frame in frames[first:last] if origin(frame.filename) != "phalanx"]
    kept = [
        frame
        for frame in between + frames[last:]
        if not (frame.name in _MODULE_CALL and frame.filename.endswith("torch/nn/modules/module.py"))
    ]
    one.stack[:] = kept
    return len(frames) - len(kept)
