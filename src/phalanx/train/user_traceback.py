"""Where in a user's own code an exception was raised, without the frames of Phalanx and PyTorch around it."""

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
    """Whose code a file is: the demonstration's jobs stand for a user's, and a cell of a notebook is one."""
    if file.startswith(_PHALANX) and not file.startswith(f"{_PHALANX}demo"):
        return "phalanx"
    if file.startswith(_TORCH):
        return "torch"
    return "library" if file.startswith((*_LIBRARY, "<")) and not file.startswith("<ipython") else "user"


def users_frames(error: BaseException) -> list[FrameSummary]:
    """The frames of ``error`` that are of users' files, the outermost first."""
    return [frame for frame in traceback.extract_tb(error.__traceback__) if origin(frame.filename) == "user"]


def format_for_user(error: BaseException) -> str:
    """The traceback of ``error`` from its first frame in a user's file on, and how many frames were left out.

    Those of Phalanx between two of the user's are left out, too, and those by which a module calls its ``forward``.
    One that has no frame of a user is a fault of Phalanx or of PyTorch, and is whole. What the exception was caused by,
    or raised while it was handled, is shortened in the same way.
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
