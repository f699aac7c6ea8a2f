"""``px.sweep`` and ``phalanx sweep``: a job with each combination of some values, one run after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.api import fit
from phalanx.config import Best, Job, Plan, RunSpec
from phalanx.config.fields import is_whole
from phalanx.config.params import Value, params
from phalanx.config.run_files import EVENTS
from phalanx.errors import PhalanxError, Problem, SpecError
from phalanx.events import RunLog
from phalanx.report.sweep_rows import SweepResult, SweepRow, Yardstick, numbers_of, reason_of

if TYPE_CHECKING:
    from phalanx.report.shown_progress import Watch

REFUSED, FAILED = 1, 3
_EXAMPLE = 'px.sweep(job, {"lr": [1e-3, 3e-4]}, ["single", "dp=2"])'


def sweep(
    job: str | Path | Callable[[], Job],
    values: Mapping[str, Sequence[Value]] | None = None,
    plans: Sequence[Plan | str] = (),
    *,
    steps: int | None = None,
    folder: str | Path | None = None,
    watch: Watch = None,
) -> SweepResult:
    """Train ``job`` with each combination of ``values`` and ``plans``, one after the other, and compare them.

    A combination that cannot be trained, or fails, is a row with its reason, and the others continue.

    Args:
        job: the path of its file (``"train.py"``, ``"train.py:name"``), its module, or the function that makes it.
        values: those to try, by a name that the job declares by ``px.param``.
        plans: those to train under; without any, each run has the one that ``px.fit`` chooses.
        steps: optimizer steps of each run, in place of the job's length.
        folder: for the runs' folders; by default ``runs/JOB-sweep-N``.
        watch: as of ``px.fit``.

    Returns:
        A row a combination, best first: by the job's ``px.Best``, else by the loss of the last evaluation, else by that
        of the last step. ``.to_dataframe()`` gives them as a table of pandas.

    Raises:
        SpecError: with every error in names, values and plans, and within a worker started by torchrun; before any run.
        Exception: the job's own error, if every combination raises it; before any run.
        KeyboardInterrupt: after Ctrl-C; the present run has saved by then, and no other begins.
        SystemExit: as of ``px.fit``.
    """
    refuse_within_workers(_EXAMPLE)
    if steps is not None and not is_whole(steps, 1):
        raise SpecError.of("steps", repr(steps), "a whole number, 1 or more", "steps=100")
    wanted = _combinations(job, values, plans)
    refuse_values(wanted)
    where = sweep_folder(wanted[0].source.stem, Path(folder) if folder is not None else None, "folder")
    runs = SweepRuns(folder=where, steps=steps, count=len(wanted), look=lambda log, label: nullcontext(watch))
    runs.train(wanted)
    return runs.result(wanted[0].source.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSource:
    """The source of a sweep's jobs.

    Attributes:
        reference: a file or module; empty if ``function`` is given.
        function: makes the job.
    """

    reference: str = ""
    function: Callable[[], object] | None = None

    def make(self, values: Mapping[str, Value]) -> Job:
        """Return the job with ``values``, loaded anew: another combination may have changed its file's state.

        Raises:
            SpecError: as of ``load_job`` and ``px.params``; or if the function does not return a job.
        """
        from phalanx.launch.jobfile import load_job

        if self.function is None:
            return load_job(self.reference_with(values))
        with params(**values):
            made = self.function()
        if not isinstance(made, Job):
            given = f"a result of type {type(made).__name__}"
            raise SpecError.of("job", given, "a function that gives a phalanx.Job", _EXAMPLE)
        return made

    def reference_with(self, values: Mapping[str, Value]) -> str:
        """Return the reference by which workers load the job with ``values``, or the function's name."""
        from phalanx.launch.jobfile import with_values

        texts = {name: value if isinstance(value, str) else repr(value) for name, value in values.items()}
        return with_values(self.reference, texts) if self.reference else self.name

    @property
    def name(self) -> str:
        """Return the reference as it was given, or the function's name."""
        return self.reference or getattr(self.function, "__name__", "job")

    @property
    def stem(self) -> str:
        """Return the name for folders."""
        from phalanx.launch.jobfile import Reference

        return Reference.parse(self.reference).stem if self.reference else self.name.strip("<>")


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """The values of a job, and the plan; ``None``: the best one here."""

    source: JobSource
    values: Mapping[str, Value]
    plan: Plan | None

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.values.items()]
        return " ".join([*words, *([f"under {self.plan}"] if self.plan else [])])


def combined(source: JobSource, values: Mapping[str, Sequence[Value]], plans: Sequence[Plan]) -> list[Combination]:
    """Return each combination of ``values`` and ``plans``, plans varying fastest, then the last name."""
    each = [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]
    return [Combination(source=source, values=one, plan=plan) for one in each for plan in plans or [None]]


def _combinations(
    job: object, values: Mapping[str, Sequence[Value]] | None, plans: Sequence[Plan | str]
) -> list[Combination]:
    problems: list[Problem] = []
    if isinstance(job, str | Path):
        source = JobSource(reference=str(job))
    elif callable(job):
        source = JobSource(function=job)
    else:
        given = "a Job, which is made already: its values are set" if isinstance(job, Job) else repr(job)[:60]
        raise SpecError.of("job", given, "the path of its file, or the function that makes it", _EXAMPLE)
    if not isinstance(values, Mapping | None):  # pyrefly: ignore
        raise SpecError.of("values", repr(values)[:60], "lists of values by name", _EXAMPLE)
    if not isinstance(plans, list | tuple) or not all(isinstance(plan, Plan | str) for plan in plans):
        raise SpecError.of("plans", repr(plans)[:60], "a list of plans", 'plans=["single", "dp=2"]')
    chosen: list[Plan] = []
    for plan in plans:
        try:
            chosen.append(plan if isinstance(plan, Plan) else Plan.parse(plan))
        except SpecError as error:
            problems += error.problems
    problems += axis_problems(values or {}, chosen, given_plans=bool(plans))
    if problems:
        raise SpecError(problems)
    return combined(source, values or {}, chosen)


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisWords:
    """The names of a sweep's values and plans at its caller, and a working line for each and for all."""

    values: str = "values"
    plans: str = "plans"
    some_values: str = '{"lr": [1e-3, 3e-4]}'
    some_plans: str = 'plans=["dp=2"]'
    example: str = _EXAMPLE


def axis_problems(
    values: Mapping[str, Sequence[Value]],
    plans: Sequence[Plan],
    words: AxisWords = AxisWords(),
    written: Mapping[str, str] | None = None,
    *,
    given_plans: bool = False,
) -> list[Problem]:
    """Return the problems of a sweep's values and plans.

    Args:
        written: by name, the text of values, for the errors.
        given_plans: whether plans were given, even if none is left.
    """
    problems: list[Problem] = []
    for name, listed in values.items():
        if allowed := _unusable(name, listed):
            shown = (written or {}).get(name, f"{name!r}: {listed!r}"[:60])
            problems.append(Problem(where=words.values, given=shown, allowed=allowed, fix=words.some_values))
    if len(set(plans)) < len(plans):
        allowed = "each plan once"
        problems.append(Problem(where=words.plans, given="one twice", allowed=allowed, fix=words.some_plans))
    if not values and not plans and not given_plans:
        allowed = "values to try, plans to try, or both"
        problems.append(Problem(where=words.values, given="nothing", allowed=allowed, fix=words.example))
    return problems


def _unusable(name: object, listed: object) -> str:
    if not (isinstance(name, str) and name.isidentifier()):
        return "names that the job declares by px.param"
    if not isinstance(listed, list | tuple) or not listed:
        return "a list of one value or more"
    if not all(isinstance(value, bool | int | float | str) for value in listed):
        return "values that are a bool, int, float or str"
    return "each value once" if len(set(listed)) < len(listed) else ""


def refuse_values(wanted: Sequence[Combination]) -> None:
    """Raise errors in names and types of the values, before the first run begins.

    The job's own errors with a combination become that combination's row.

    Raises:
        SpecError: the job does not declare a name, a value is not of its type, or jobs have different ``best``.
        Exception: the job's own error, if every combination raises it.
    """
    errors: list[Exception] = []
    found: dict[Problem, None] = {}
    compared: dict[Best | None, None] = {}
    each = {tuple(one.values.values()): one for one in wanted}
    for one in each.values():
        try:
            compared[one.source.make(one.values).best] = None
        except Exception as error:  # a job of any make
            errors.append(error)
            problems = error.problems if isinstance(error, SpecError) else ()
            found |= dict.fromkeys(one for one in problems if one.where.startswith("set "))
    if len(compared) > 1:
        given = "values that change by which number evaluations are compared: " + "; ".join(map(str, compared))
        found[Problem(where="job.best", given=given, allowed="one for all runs", fix="a sweep for each")] = None
    if found:
        raise SpecError(found)
    if len(errors) == len(each):
        raise errors[0]


def refuse_within_workers(example: str) -> None:
    """Refuse a sweep in a process of torchrun's.

    Raises:
        SpecError: in such a process.
    """
    from phalanx.launch.torchrun import place_of_this_process

    if place_of_this_process() is not None:
        given, allowed = "within a worker that torchrun started", "one process, which starts the workers of each run"
        raise SpecError.of("sweep", given, allowed, example)


def sweep_folder(stem: str, given: Path | None, where: str) -> Path:
    """Return the folder for the runs' folders.

    Args:
        where: the argument or option that ``given`` comes from.

    Raises:
        SpecError: it is not empty.
    """
    from phalanx.launch.runfile import default_folder

    if given is None:
        return default_folder(f"{stem}-sweep")
    if given.exists() and any(given.iterdir()):
        fix = f"{where} {given}-2" if where.startswith("-") else f'{where}="{given}-2"'
        raise SpecError.of(where, f"{given}, which holds something", "a new folder, or an empty one", fix)
    return given


@dataclass(kw_only=True, slots=True)
class SweepRuns:
    """The runs of a sweep with their results so far.

    Attributes:
        steps: of each run; ``None``: the job's own.
        count: of all combinations.
        look: returns a watcher for the run with a label, to be called as ``px.fit``'s ``watch``.
        best: the runs' jobs' criterion for evaluations.
    """

    folder: Path
    steps: int | None
    count: int
    look: Callable[[Path, str], AbstractContextManager[Any]]
    rows: list[SweepRow] = field(default_factory=list["SweepRow"])
    best: Best | None = None

    def result(self, job: str) -> SweepResult:
        """Return the results so far."""
        by = Yardstick(best=self.best)
        rows = tuple(by.ranked(self.rows))
        return SweepResult(job=job, folder=self.folder, rows=rows, yardstick=by, combinations=self.count)

    @property
    def exit_code(self) -> int:
        """Return 0 if all were trained, 1 if one was refused, 3 if one failed."""
        outcomes = {row.outcome for row in self.rows}
        return FAILED if "failed" in outcomes else REFUSED if "refused" in outcomes else 0

    def train(self, wanted: Sequence[Combination]) -> None:
        """Train each and add its row, for any outcome. Raises errors that stop the whole sweep."""
        for number, one in enumerate(wanted, 1):
            self._run(one, self.folder / f"{number:0{len(str(self.count))}}", f"{number}/{self.count} {one}")

    def _run(self, one: Combination, folder: Path, label: str) -> None:
        began, clock = time.time(), time.monotonic()
        told: dict[str, Any] = {"plan": str(one.plan or ""), "outcome": "done"}
        try:
            told["plan"] = str(self._trained(one, folder, label))
        except (KeyboardInterrupt, SystemExit):
            if not RunLog(folder).ended_since(began):
                told |= {"outcome": "stopped", "reason": "asked to stop"}
            raise
        except Exception as error:  # a job of any make
            refused = isinstance(error, PhalanxError) and error.exit_code != FAILED
            told |= {"outcome": "refused" if refused else "failed", "reason": reason_of(error)}
        finally:
            there = folder.is_dir()
            numbers = numbers_of(folder, self.best) if there and told["outcome"] == "done" else {}
            told |= {"seconds": time.monotonic() - clock, "folder": str(folder) if there else None}
            self.rows.append(SweepRow(values=one.values, **told, **numbers))

    def _trained(self, one: Combination, folder: Path, label: str) -> Plan:
        from phalanx.preflight import choose_plan

        job = one.source.make(one.values)
        self.best = self.best or job.best
        plan = one.plan or choose_plan(job).plan
        run = RunSpec(job=one.source.reference_with(one.values), plan=plan, folder=folder, steps=self.steps)
        with self.look(folder / EVENTS, label) as watch:
            fit(job, run=run, watch=watch)
        return plan
