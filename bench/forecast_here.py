"""Forecast beside measured step time on this machine: every kind of plan, 1, 2 and 4 processes, by the clock.

``OMP_NUM_THREADS=1 python bench/forecast_here.py [--on machine.toml] [--rounds N] [--only WORD] [--write]``; without
``--on`` it calibrates first, as a user does. Runs go through ``phalanx.fit``; the time of a step is the one that the
run's own summary tells. Forecasts have the constants that a run here gets with ``machine.toml`` beside its job.
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
from phalanx.errors import PhalanxError, ProfileError
from phalanx.events import read
from phalanx.forecast import Forecast, Work, forecast
from phalanx.foresight import cluster_for
from phalanx.hardware.calibrate import default_path
from phalanx.hardware.quiet import wait_until_quiet
from phalanx.observe.summary import WARM_UP
from phalanx.spec import Plan, RunSpec
from phalanx.train.work import work_of

STEPS = 9  # whole rounds of three for replicas that are averaged after as many
LONGEST = 120  # seconds of a run
PATIENCE = 2.0  # seconds to wait before each run until nothing else computes


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A plan of a job, foretold and measured.

    Attributes:
        job: its name.
        kind: of plan.
        plan: it.
        foretold: with the constants of this machine.
        catalog: with those of the catalog, as before ``phalanx calibrate``.
        rounds: seconds of a step in each round.
        busy: share of the cores that others kept busy before each round.
    """

    job: str
    kind: str
    plan: Plan
    foretold: Forecast
    catalog: Forecast
    rounds: tuple[float, ...]
    busy: tuple[float, ...]

    @property
    def measured(self) -> float:
        """Seconds of a step: the median of the rounds."""
        return statistics.median(self.rounds)

    @property
    def error(self) -> float:
        """How far the forecast is above what was measured, as a share of it."""
        return self.foretold.step / self.measured - 1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--on", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no run of a later round after so many")
    parser.add_argument("--only", default="")
    parser.add_argument("--save", default="", help="also write what was measured into this file, for another --from")
    parser.add_argument("--write", action="store_true", help="write the page, and the spread that intervals rest on")
    given = parser.parse_args()
    from forecast_page import report, write

    with tempfile.TemporaryDirectory() as folder:
        machine = Path(folder) / default_path()
        machine.write_text(Path(given.on).read_text() if given.on else _calibrated(Path(folder) / "own.toml"))
        with chdir(folder):
            found, refused = cases(given.rounds, given.only, time.monotonic() + 60 * given.minutes)
    if given.save:
        rows = [{"job": one.job, "plan": str(one.plan), "rounds": one.rounds} for one in found]
        Path(given.save).write_text(json.dumps(rows), encoding="utf-8")
    print(report(found, refused))
    if given.write:
        write(found, refused)
    return 0


def cases(rounds: int, only: str, end: float) -> tuple[list[Case], list[tuple[str, Plan, str]]]:
    """Every plan of every job, its rounds apart from each other in time; and what was refused, with why."""
    asked: list[Case] = []
    refused: list[tuple[str, Plan, str]] = []
    for name, make in JOBS.items():
        job = make()
        wanted = [(kind, plan) for kind, plan in plans(name, job.batch) if only in f"{name} {kind} {plan}"]
        try:
            work = _apart(make) if wanted else None
        except PhalanxError as error:
            refused += [(name, plan, _line(error)) for _, plan in wanted]
            continue
        for kind, plan in wanted:
            assert work is not None
            try:
                asked.append(_foretold(name, kind, plan, work))
            except PhalanxError as error:
                refused.append((name, plan, _line(error)))
    times: dict[int, list[tuple[float, float]]] = {}
    for turn in range(rounds):
        for index, one in enumerate(asked):
            if turn and (index not in times or time.monotonic() > end):
                continue
            busy = wait_until_quiet(PATIENCE)
            try:
                times.setdefault(index, []).append((measured(JOBS[one.job](), one.plan), busy))
            except (PhalanxError, TimeoutError) as error:
                times.pop(index, None)
                refused.append((one.job, one.plan, _line(error)))
                continue
            last = times[index][-1]
            ratio = one.foretold.step / last[0] - 1
            said = f"{one.job:8} {one.plan!s:44} {one.foretold.step:.4f} {last[0]:.4f} {ratio:+.0%} busy {busy:.0%}"
            print(said, file=sys.stderr, flush=True)
    found = [
        replace(one, rounds=tuple(each for each, _ in times[index]), busy=tuple(each for _, each in times[index]))
        for index, one in enumerate(asked)
        if index in times
    ]
    return found, refused


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


def _foretold(name: str, kind: str, plan: Plan, work: Work) -> Case:
    """The forecasts of a plan as a run gets them here: with ``machine.toml`` beside it, and without."""
    here = forecast(work, plan, cluster_for(plan))
    with tempfile.TemporaryDirectory() as elsewhere, chdir(elsewhere):
        catalog = forecast(work, plan, cluster_for(plan))
    return Case(job=name, kind=kind, plan=plan, foretold=here, catalog=catalog, rounds=(), busy=())


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
    return (event for event in read(folder / "events.jsonl") if event["event"] == "step")


def _calibrated(path: Path) -> str:
    from phalanx.cli.calibrate import command

    command.main(["-o", str(path)], standalone_mode=False)
    return path.read_text()


if __name__ == "__main__":
    if "OMP_NUM_THREADS" not in os.environ:
        print("note: without OMP_NUM_THREADS=1 one process computes with all cores", file=sys.stderr)
    begun = time.monotonic()
    code = main()
    print(f"{time.monotonic() - begun:.0f} s", file=sys.stderr)
    sys.exit(code)
