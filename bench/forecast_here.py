"""Forecast beside measured step time on this machine: every kind of plan, 1, 2 and 4 processes, by the clock.

``PYTHONPATH=tools OMP_NUM_THREADS=1 python bench/forecast_here.py [--on machine.toml] [--rounds N] [--only WORD]
[--write]``; without ``--on`` it calibrates before the plans of each job in each round, as a user does before a run: a
shared machine is faster in one quarter of an hour than in the next. Runs go through ``phalanx.fit``; the time of a
step is the one that the run's own summary tells. Forecasts have the constants that a run here gets with
``machine.toml`` in its working directory.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import chdir, contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import phalanx as px
from forecast_models import JOBS, plans
from phalanx.config import Plan, RunSpec
from phalanx.errors import PhalanxError, ProfileError
from phalanx.events import RunLog
from phalanx.forecast import Forecast, Work, forecast
from phalanx.hardware.calibrate import default_path, wait_until_quiet
from phalanx.preflight import cluster_for
from phalanx.report.summary import WARM_UP
from phalanx.train.traced_job import work_of

STEPS = 9  # whole rounds of three for replicas that are averaged after as many
LONGEST = 120  # seconds of a run
PATIENCE = 2.0  # seconds to wait before each run until nothing else computes


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """A plan of a job, foretold and then measured.

    Attributes:
        foretold: with the constants of this machine, measured before the round.
        catalog: with those of the catalog, as without ``phalanx calibrate``.
        seconds: of a step.
        busy: share of the cores that others kept busy before.
    """

    foretold: Forecast
    catalog: Forecast
    seconds: float
    busy: float

    @property
    def error(self) -> float:
        """How far the forecast is above what was measured, as a share of it."""
        return self.foretold.step / self.seconds - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A plan of a job in every round; what is told of it is the round whose error is the middle one.

    Attributes:
        job: its name.
        kind: of plan.
        plan: it.
        rounds: in order of time; of an even number the worse of the two middle ones counts.
    """

    job: str
    kind: str
    plan: Plan
    rounds: tuple[Round, ...]

    @property
    def middle(self) -> Round:
        """The round that counts."""
        errors = sorted(self.rounds, key=lambda one: one.error)
        half = len(errors) // 2
        return errors[half] if len(errors) % 2 else max(errors[half - 1 : half + 1], key=lambda one: abs(one.error))

    @property
    def foretold(self) -> Forecast:
        """Its forecast."""
        return self.middle.foretold

    @property
    def catalog(self) -> Forecast:
        """Its forecast without a calibration."""
        return self.middle.catalog

    @property
    def measured(self) -> float:
        """Its seconds of a step."""
        return self.middle.seconds

    @property
    def error(self) -> float:
        """Its error."""
        return self.middle.error


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--on", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no run of a later round after so many")
    parser.add_argument("--only", default="")
    parser.add_argument("--save", default="", help="also write what was foretold and measured into this file")
    parser.add_argument("--write", action="store_true", help="write the page, and the spread that intervals rest on")
    given = parser.parse_args()
    from forecast_page import report, write

    with tempfile.TemporaryDirectory() as folder:
        machine = Path(folder) / default_path()
        with chdir(folder):
            found, refused = cases(machine, given)
    if given.save:
        rows = [
            {
                "job": one.job,
                "plan": str(one.plan),
                "rounds": [[each.foretold.step, each.seconds] for each in one.rounds],
            }
            for one in found
        ]
        Path(given.save).write_text(json.dumps(rows), encoding="utf-8")
    print(report(found, refused))
    if given.write:
        write(found, refused)
    return 0


def cases(machine: Path, given: argparse.Namespace) -> tuple[list[Case], list[tuple[str, Plan, str]]]:
    """Every plan of every job, its rounds apart from each other in time; and what was refused, with why."""
    works: dict[str, Work] = {}
    asked: list[tuple[str, str, Plan]] = []
    refused: list[tuple[str, Plan, str]] = []
    for name, make in JOBS.items():
        wanted = [(kind, plan) for kind, plan in plans(name, make().batch) if given.only in f"{name} {kind} {plan}"]
        try:
            works |= {name: _apart(make)} if wanted else {}
            asked += [(name, kind, plan) for kind, plan in wanted]
        except PhalanxError as error:
            refused += [(name, plan, _line(error)) for _, plan in wanted]
    end = time.monotonic() + 60 * given.minutes
    rounds: dict[tuple[str, str, Plan], list[Round]] = {}
    for turn in range(given.rounds):
        if turn and time.monotonic() > end:
            break
        latest = ""
        for one in list(asked):
            if turn and time.monotonic() > end:
                break
            if one[0] != latest:
                latest = one[0]
                machine.write_text(
                    Path(given.on).read_text() if given.on else _calibrated(machine.with_name("own.toml"))
                )
            try:
                rounds.setdefault(one, []).append(_round(one, works[one[0]]))
            except (PhalanxError, TimeoutError) as error:
                asked.remove(one)
                rounds.pop(one, None)
                refused.append((one[0], one[2], _line(error)))
    found = [Case(job=name, kind=kind, plan=plan, rounds=tuple(rounds[name, kind, plan])) for name, kind, plan in asked]
    return found, refused


def _round(one: tuple[str, str, Plan], work: Work) -> Round:
    """One plan: its forecasts as a run gets them here, with ``machine.toml`` beside it and without; and its time."""
    name, _, plan = one
    here = forecast(work, plan, cluster_for(plan))
    with tempfile.TemporaryDirectory() as elsewhere, chdir(elsewhere):
        catalog = forecast(work, plan, cluster_for(plan))
    busy = wait_until_quiet(PATIENCE)
    found = Round(foretold=here, catalog=catalog, seconds=measured(JOBS[name](), plan), busy=busy)
    said = f"{name:8} {plan!s:44} {here.step:.4f} {found.seconds:.4f} {found.error:+.0%} busy {busy:.0%}"
    print(said, file=sys.stderr, flush=True)
    return found


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    """Give a run up that takes longer than that, so that the others are measured."""

    def over(*_: object) -> None:
        raise TimeoutError(f"it took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:160]


def _apart(make: Callable[[], px.Job]) -> Work:
    """The work of a job, looked at in a process of its own: its memory would change how that of workers is kept."""
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        return pool.submit(_work, make).result()


def _work(make: Callable[[], px.Job]) -> Work:
    try:
        return work_of(make())
    except ProfileError:  # shapes that depend on values, as ``phalanx forecast --profile measure`` looks at them
        return work_of(make(), values=True)


def measured(job: px.Job, plan: Plan) -> float:
    """Seconds of a step of ``px.fit`` by the clock, the first ones left out.

    As the summary of a run tells them: the median. Where steps are unlike by plan, averaging after some of them, the
    mean of whole rounds.
    """
    asked = replace(job, steps=STEPS, epochs=None, evaluate=None, metrics=None)
    with tempfile.TemporaryDirectory() as scratch:
        spec = RunSpec(job=job.name, plan=plan, folder=Path(scratch) / "run", forecast="none")
        with _at_most(LONGEST):
            run = px.fit(asked, run=spec)
        seconds = [float(event["seconds"]) for event in _steps(run.folder)][WARM_UP:]
    return statistics.fmean(seconds) if plan.every > 1 else statistics.median(seconds)


def _steps(folder: Path) -> Iterator[dict[str, Any]]:
    return (event for event in RunLog(folder).events if event["event"] == "step")


def _calibrated(path: Path) -> str:
    from phalanx.cli.calibration import calibrate_command

    calibrate_command.main(["-o", str(path)], standalone_mode=False)
    return path.read_text()


if __name__ == "__main__":
    if "OMP_NUM_THREADS" not in os.environ:
        print("note: without OMP_NUM_THREADS=1 one process computes with all cores", file=sys.stderr)
    begun = time.monotonic()
    code = main()
    print(f"{time.monotonic() - begun:.0f} s", file=sys.stderr)
    sys.exit(code)
