"""One cell of the grid: a job proven under a plan, what came of it, and whether that is what must come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Self

from case_table import CASES, Expected

import phalanx as px
from phalanx.errors import PhalanxError, SpecError, WorkerError
from phalanx.launch.worker_pool import WorkerPool


@dataclass(frozen=True, kw_only=True, slots=True)
class Came:
    """What came of a cell.

    Attributes:
        outcome: ``equal``, ``unequal``, ``refused`` (before workers started), ``stopped`` (the run ended with an error
            of Phalanx's own), ``crashed``, or ``hung``.
        said: the cause, the refusal or the error, in words.
        before: what was said before the run.
        where: the fields that a refusal names.
    """

    outcome: str
    said: str = ""
    before: tuple[str, ...] = ()
    where: tuple[str, ...] = ()

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Self:
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in told.items()})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def came(name: str, plan: str, steps: int | None = None) -> Came:
    """Prove the case called ``name`` under ``plan``."""
    return proven(CASES[name].job, plan, steps)


def proven(make: Callable[[], px.Job], plan: str, steps: int | None = None) -> Came:
    """Prove the job that ``make`` gives under ``plan``."""
    before: list[str] = []
    with _starts() as started:
        try:
            job = make()
            proof = px.prove(job, plan, steps=steps or job.steps or 4, say=before.append)
        except SpecError as error:
            return Came(
                outcome="stopped" if started else "refused",
                said=str(error),
                before=tuple(before),
                where=tuple(one.where for one in error.problems),
            )
        except WorkerError as error:
            crashed = bool(error.traceback) and error.traceback in str(error)
            return Came(outcome="crashed" if crashed else "stopped", said=str(error), before=tuple(before))
        except PhalanxError as error:
            return Came(outcome="stopped" if started else "refused", said=str(error), before=tuple(before))
        except Exception as error:
            return Came(outcome="crashed", said=f"{type(error).__name__}: {error}", before=tuple(before))
    return Came(outcome="equal" if proof.equal else "unequal", said=proof.cause, before=tuple(before))


def wrong(expected: Expected, found: Came) -> str:
    """In which way ``found`` is not what must come; empty where it is."""
    against = [note for note in found.before if not note.startswith(_HARMLESS)]
    said = found.before
    match expected.outcome:
        case "equal":
            right = found.outcome == "equal" and not against
        case "named" | "near":
            right = any(note.startswith(expected.words) for note in said)
            right &= found.said.startswith(expected.words) if found.outcome == "unequal" else expected.outcome == "near"
            right &= found.outcome in ("equal", "unequal")
        case _:
            right = found.outcome == expected.outcome and expected.words in found.said
            right &= not expected.where or expected.where in found.where
    if right:
        return ""
    words = f" ({expected.where} {expected.words})".replace("( ", "(") if expected.words or expected.where else ""
    return f"{expected.outcome}{words} must come, and {found.outcome} came: {found.said} {list(found.before)}"


_HARMLESS = (
    "dropout is switched off",
    "BatchNorm takes statistics of each micro-batch and is not equal when one is split",
)
"""What is said of a job under every plan."""


@contextmanager
def _starts() -> Iterator[list[bool]]:
    """An entry for each time that workers are started."""
    started: list[bool] = []
    start: Callable[[WorkerPool], None] = WorkerPool.start

    def noted(self: WorkerPool) -> None:
        started.append(True)
        start(self)

    WorkerPool.start = noted
    try:
        yield started
    finally:
        WorkerPool.start = start
