"""What one worker of a run does, whoever started it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.comm import Place
from phalanx.errors import Problem, RefusedError, SpecError
from phalanx.launch.failure import Failure, describe, worker_error
from phalanx.launch.jobfile import load_job
from phalanx.launch.readiness import make_ready
from phalanx.launch.torchelastic import claim, place_from_environment
from phalanx.spec import RunSpec
from phalanx.train import overrides
from phalanx.train.loop import train

_SECOND_THOUGHTS = 0.5  # seconds in which the worker that failed first may say so before one that only lost its peer


def work(run: RunSpec, place: Place, report: Callable[[int], None]) -> dict[str, Any]:
    """Load the run's job and train it, as the worker at ``place``.

    Args:
        run: what to train, how, and where to.
        place: among the workers of the run.
        report: takes the number of each optimizer step as it begins.

    Returns:
        The summary of the training loop.
    """
    make_ready(run.plan)
    return train(overrides.apply(load_job(run.job), run), run, place, report=report)


def main(runfile: Path) -> int:
    """Be one worker of the run in ``runfile``: one of torchrun's, or the only one.

    An error goes to stderr, once for all workers, with the rank and the step.

    Returns:
        The exit code for this process: 0, or that of the error.
    """
    at = _Progress()
    place = Place()
    elastic = False
    try:
        found = place_from_environment()
        elastic, place = found is not None, found or place
        run = _read(runfile)
        _refuse_another_world(run, place, runfile)
        work(run, place, at.report)
    except Exception as error:
        failure = Failure(rank=place.rank, step=at.step, **describe(error))
        if not elastic or _speaks_for_all(failure):
            print(worker_error(failure, place.world_size, memory_kills=0), file=sys.stderr, flush=True)
        return failure.exit_code
    return 0


class _Progress:
    step: int | None = None

    def report(self, step: int) -> None:
        self.step = step


def _speaks_for_all(failure: Failure) -> bool:
    if not failure.lost_peer:
        return claim("failed")
    time.sleep(_SECOND_THOUGHTS)
    return claim("failed")


def _read(runfile: Path) -> RunSpec:
    try:
        return RunSpec.from_toml(runfile.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(
            [
                Problem(
                    where="run file",
                    given=f"{runfile}: {error.strerror}",
                    allowed="the run.toml of a run folder",
                    fix="phalanx worker runs/digits-1/run.toml",
                )
            ]
        ) from None


def _refuse_another_world(run: RunSpec, place: Place, runfile: Path) -> None:
    if place.world_size != run.plan.world_size:
        raise RefusedError(
            [
                Problem(
                    where="workers",
                    given=f"{place.world_size}",
                    allowed=f"{run.plan.world_size}, as the plan {run.plan} says",
                    fix=f"torchrun --nproc-per-node {run.plan.world_size} --no-python phalanx worker {runfile}",
                )
            ]
        )
