"""Says which line of a model cannot be followed without values."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from phalanx.errors import Problem, ProfileError

_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def refusal(error: Exception) -> ProfileError:
    """The error for a model that raised ``error`` on fake tensors."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(_OURS)]
    where = f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "the model"
    said = (str(error).splitlines() or [""])[0]
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        given = f"{where} (its result depends on values: {said})"
    else:
        given = f"{where} ({type(error).__name__}: {said})"
    return ProfileError(
        [
            Problem(
                where="job.model",
                given=given,
                allowed="models whose operations and shapes follow from the forms of their inputs alone",
                fix="--profile measure",
            )
        ]
    )
