"""Every error Phalanx raises on purpose. Each says what was given, what is allowed and what to do.

PhalanxError
├── SpecError            a job, plan, cluster or option is wrong; carries every Problem found  (exit code 2)
│   ├── RefusedError     each part is valid, but this plan cannot serve this job here          (exit code 2)
│   └── ProfileError     a model's costs cannot be found without running it                    (exit code 2)
├── MissingExtraError    an optional package is needed; names the extra to install            (exit code 2)
└── RunError             a run started and could not go on                                    (exit code 3)
    ├── LossError        the loss is NaN, infinite, or of a wrong form
    ├── GradientError    parameters got no gradient, or the optimizer holds other parameters
    ├── DataError        the data differ between ranks, or end where they must not
    ├── DriftError       replicas that should hold the same parameters do not
    ├── CheckpointError  a checkpoint is incomplete, of another model, or could not be written
    │   ├── DamagedError a checkpoint does not hold what was written; an earlier one may
    │   └── NoneWholeError there are checkpoints to go on from, and each is damaged
    └── WorkerError      a worker process failed: its rank, its step, its own traceback
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One error in a user's input.

    Attributes:
        where: the field or option, such as ``plan.zero`` or ``--plan``.
        given: the value found there.
        allowed: the allowed values; empty if ``given`` says all.
        fix: a line to copy that would work.
    """

    where: str
    given: str
    allowed: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: given {self.given}{self.allowed and f'; allowed: {self.allowed}'}\n    try: {self.fix}"


class PhalanxError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 3


class SpecError(PhalanxError):
    """An error in the user's input. ``problems`` lists everything found, not only the first."""

    exit_code = 2

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,)

    @classmethod
    def of(cls, where: str, given: str, allowed: str, fix: str) -> Self:
        """Build the error with one problem."""
        return cls([Problem(where=where, given=given, allowed=allowed, fix=fix)])


class RefusedError(SpecError):
    """A valid plan and a valid job that do not work together on this machine."""


class ProfileError(SpecError):
    """A model that cannot be traced without values, so that its costs are unknown."""


class MissingExtraError(PhalanxError):
    """A missing optional package."""

    exit_code = 2

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"this needs the package {package!r}, which is not installed\n    try: pip install 'phalanx[{extra}]'"
        )


class RunError(PhalanxError):
    """A run that started and could not continue; exit code 2 if it fails before anything has run.

    Attributes:
        everywhere: all ranks have raised it together, so no single rank is named.
    """

    everywhere = False


class LossError(RunError):
    """A loss that is NaN, infinite, or not a sum and a count or a plain mean."""


class GradientError(RunError):
    """Parameters without gradient, or an optimizer over other parameters than it was given."""


class DataError(RunError):
    """Data that differ between ranks, or end too early."""


class DriftError(RunError):
    """Replicas with different parameters that should be equal."""


class CheckpointError(RunError):
    """A checkpoint is incomplete, belongs to another model, or could not be written."""


class DamagedError(CheckpointError):
    """A checkpoint whose content has changed: an earlier one may still be whole.

    Attributes:
        checkpoint: its folder.
        file: the damaged file in it, or "".
        tensor: the unreadable tensor, or "".
    """

    def __init__(self, message: str, *, checkpoint: str = "", file: str = "", tensor: str = "") -> None:
        super().__init__(message)
        self.checkpoint, self.file, self.tensor = checkpoint, file, tensor


class NoneWholeError(CheckpointError):
    """Damage in every checkpoint that a run could resume from."""


class WorkerError(RunError):
    """A failed worker process.

    Attributes:
        rank: rank of the first worker that failed.
        step: the optimizer step it was in, ``None`` before the first.
        kind: class name of its exception, or ``signal 9`` and the like.
        traceback: its own traceback text; empty if a signal ended it.
        hang: the state of every rank, if one did not come and the others waited; the ``hang`` event of the log.
        lost: whether a worker was lost, rather than that its code failed or diverged from its peers'.
    """

    def __init__(
        self, message: str, *, rank: int, step: int | None, kind: str, traceback: str, exit_code: int = 3
    ) -> None:
        super().__init__(message)
        self.rank, self.step, self.kind, self.traceback = rank, step, kind, traceback
        self.exit_code = exit_code
        self.hang: Mapping[str, Any] | None = None
        self.lost = False


def error_to_dict(error: BaseException) -> dict[str, Any]:
    """Return ``error`` as JSON, to be raised on another rank."""
    problems = [asdict(problem) for problem in error.problems] if isinstance(error, SpecError) else []
    return {"kind": type(error).__name__, "message": str(error), "problems": problems}


def error_from_dict(told: Mapping[str, Any]) -> Exception:
    """Build the error from the result of ``error_to_dict``: Phalanx's own and Python's keep their class.

    An error of another class becomes a ``RunError`` that names it.
    """
    kind, message = str(told["kind"]), str(told["message"])
    known = globals().get(kind) or vars(builtins).get(kind)
    if told["problems"]:
        wanted = known if isinstance(known, type) and issubclass(known, SpecError) else SpecError
        return wanted(Problem(**problem) for problem in told["problems"])
    if isinstance(known, type) and issubclass(known, Exception) and not issubclass(known, SpecError):
        with suppress(TypeError):  # some take more than a message
            return known(message)
    return RunError(f"{kind}: {message}")


_OUT_OF_MEMORY = re.compile(
    r"out of memory|allocate memory|unable to allocate|not enough memory|memory ran out|MemoryError", re.IGNORECASE
)


def is_out_of_memory(kind: str, message: str) -> bool:
    """Return True if an exception of the class ``kind`` reports a lack of memory, on a device or the host."""
    return kind in ("MemoryError", "OutOfMemoryError") or _OUT_OF_MEMORY.search(message) is not None
