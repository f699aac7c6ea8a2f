"""``phalanx sweep``: a job with each combination of some values, one run after the other, and which was best."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.options import JobReference, PlanText, refuse_params
from phalanx.cli.output import STOPPED, answer, json_option
from phalanx.cli.way_on import ended_since
from phalanx.config import Job, Plan, RunSpec
from phalanx.errors import PhalanxError, Problem, SpecError

if TYPE_CHECKING:
    from phalanx.report.sweep_rows import SweepRow, Yardstick

_EXAMPLE = "phalanx sweep train.py --set lr=1e-3,3e-4"
_REFUSED, _FAILED = 1, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """Values as they were written, the job's reference with them, and the plan; ``None``: the best there is here."""

    values: dict[str, str]
    reference: str
    plan: Plan | None

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.values.items()]
        return " ".join([*words, *([f"under {self.plan}"] if self.plan else [])])


@click.command("sweep", short_help="Train a job with each combination of some values.")
@click.argument("job", type=JobReference())
@click.option(
    "--set",
    "given",
    metavar="NAME=VALUE,...",
    multiple=True,
    help="Values of a name that the job declares by px.param; repeat it for other names.",
)
@click.option("--plan", "plans", type=PlanText(), multiple=True, help="A plan to train under; repeat it for others.")
@click.option("--steps", type=click.IntRange(min=1), help="Optimizer steps of each run, in place of the job's length.")
@click.option("--run", "folder", type=click.Path(path_type=Path, file_okay=False), help="Folder [runs/JOB-sweep-N].")
@click.option("--quiet", is_flag=True, help="Show no progress.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    job: str,
    given: tuple[str, ...],
    plans: tuple[Plan, ...],
    steps: int | None,
    folder: Path | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Train JOB with each combination of values and plans, one after the other, and show them side by side, best first.

    Each run has a folder of its own in the sweep's. Runs are compared by the job's px.Best, else by the loss of their
    last evaluation, else by that of their last step. A combination that cannot be trained is a row with its reason, and
    the others go on. Ctrl-C ends the sweep with the table of what there is.

    Exit code 0: all were trained. 1: a combination was refused. 2: wrong use; nothing ran. 3: a run failed.

    \b
    Examples:
      phalanx sweep train.py --set lr=1e-3,3e-4 --set width=64,128
      phalanx sweep train.py --set lr=1e-3,3e-4 --plan dp=2 --steps 100
      phalanx sweep train.py --set lr=1e-3,3e-4 --run runs/rates --json
    """
    _refuse_within_workers()
    wanted = combinations(job, given, plans)
    refuse_values(wanted)
    sweep = SweepRuns(folder=_folder(job, folder), steps=steps, quiet=quiet, count=len(wanted))
    code = sweep.train(wanted)

    from phalanx.report.sweep_rows import sweep_table, sweep_to_dict

    told = sweep_to_dict(job, sweep.folder, sweep.rows, sweep.yardstick, len(wanted))
    answer(as_json, told, lambda _: sweep_table(told))
    ctx.exit(code)


def combinations(job: str, given: Sequence[str], plans: Sequence[Plan]) -> list[Combination]:
    """Each combination of the values ``NAME=VALUE,...`` and the plans, the last name varying fastest.

    Raises:
        SpecError: with everything that is wrong in how they are written.
    """
    from phalanx.launch.jobfile import with_values

    if given:
        refuse_params(job, given[0])
    axes: dict[str, list[str]] = {}
    problems: list[Problem] = []
    for text in given:
        name, equals, listed = text.partition("=")
        values = [value.strip() for value in listed.split(",")]
        allowed = ""
        if not equals or not name.isidentifier() or "" in values:
            allowed = "NAME=VALUE,VALUE of a name that the job declares"
        elif name in axes:
            allowed = f"all values of {name} behind one --set"
        elif len(set(values)) < len(values):
            allowed = "each value once"
        if allowed:
            problems.append(Problem(where="--set", given=repr(text), allowed=allowed, fix="--set lr=1e-3,3e-4"))
        axes[name] = values
    if len(set(plans)) < len(plans):
        problems.append(Problem(where="--plan", given="one twice", allowed="each plan once", fix="--plan dp=2"))
    if not given and not plans:
        allowed = "values to try, plans to try, or both"
        problems.append(Problem(where="--set", given="nothing", allowed=allowed, fix=_EXAMPLE))
    if problems:
        raise SpecError(problems)
    each = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    return [
        Combination(values=values, reference=with_values(job, values), plan=plan)
        for values in each
        for plan in plans or [None]
    ]


def refuse_values(wanted: Sequence[Combination]) -> None:
    """Raise what is wrong with names and types of the values, before the first run begins.

    What the job itself says of a combination is that combination's row.

    Raises:
        SpecError: a name is none that the job declares, or a value is not of its type; or the job cannot be loaded.
    """
    from phalanx.launch.jobfile import load_job

    errors: list[SpecError] = []
    found: dict[Problem, None] = {}
    references = dict.fromkeys(one.reference for one in wanted)
    for reference in references:
        try:
            load_job(reference)
        except SpecError as error:
            errors.append(error)
            found |= dict.fromkeys(one for one in error.problems if one.where.startswith("set "))
    if found:
        raise SpecError(found)
    if len(errors) == len(references):
        raise errors[0]


def _refuse_within_workers() -> None:
    from phalanx.launch import place_of_this_process

    if place_of_this_process() is not None:
        given, allowed = "within a worker that torchrun started", "one process, which starts the workers of each run"
        raise SpecError.of("phalanx sweep", given, allowed, f"{_EXAMPLE} --plan dp=2")


def _folder(job: str, given: Path | None) -> Path:
    """Where the runs' folders are put."""
    from phalanx.launch import Reference, default_folder

    if given is None:
        return default_folder(f"{Reference.parse(job).stem}-sweep")
    if given.exists() and any(given.iterdir()):
        fix = f"--run {given}-2"
        raise SpecError.of("--run", f"{given}, which holds something", "a new folder, or an empty one", fix)
    return given


@dataclass(kw_only=True, slots=True)
class SweepRuns:
    """The runs of a sweep, and what they came to so far.

    Attributes:
        steps: of each run; ``None``: as long as the job says.
        count: of all combinations.
        best: by which number the runs' jobs compare evaluations.
    """

    folder: Path
    steps: int | None
    quiet: bool
    count: int
    rows: list[SweepRow] = field(default_factory=list["SweepRow"])
    best: Any = None

    @property
    def yardstick(self) -> Yardstick:
        """By which number the rows are compared."""
        from phalanx.report.sweep_rows import Yardstick

        return Yardstick(best=self.best)

    def train(self, wanted: Sequence[Combination]) -> int:
        """Train each, and give the exit code; ends early where it is asked to stop."""
        for number, one in enumerate(wanted, 1):
            try:
                self._run(one, self.folder / f"{number:0{len(str(self.count))}}", f"{number}/{self.count} {one}")
            except KeyboardInterrupt:
                return STOPPED
            except SystemExit as stop:
                return stop.code if isinstance(stop.code, int) else _FAILED
        outcomes = {row.outcome for row in self.rows}
        return _FAILED if "failed" in outcomes else _REFUSED if "refused" in outcomes else 0

    def _run(self, one: Combination, folder: Path, label: str) -> None:
        """Train one and add its row, whatever it comes to. Raises what asks the whole sweep to stop."""
        from phalanx.report.sweep_rows import SweepRow, numbers_of, reason_of

        began, clock = time.time(), time.monotonic()
        told: dict[str, Any] = {"plan": str(one.plan or ""), "outcome": "done"}
        try:
            told["plan"] = str(self._trained(one, folder, label))
        except (KeyboardInterrupt, SystemExit):
            if not ended_since(folder, began):
                told |= {"outcome": "stopped", "reason": "asked to stop"}
            raise
        except Exception as error:  # a job of any make
            refused = isinstance(error, PhalanxError) and error.exit_code != _FAILED
            told |= {"outcome": "refused" if refused else "failed", "reason": reason_of(error)}
        finally:
            there = folder.is_dir()
            numbers = numbers_of(folder, self.best) if there and told["outcome"] == "done" else {}
            told |= {"seconds": time.monotonic() - clock, "folder": str(folder) if there else None}
            self.rows.append(SweepRow(values=one.values, **told, **numbers))

    def _trained(self, one: Combination, folder: Path, label: str) -> Plan:
        from phalanx.api import fit
        from phalanx.events.following import Follower
        from phalanx.launch.jobfile import load_job
        from phalanx.preflight import choose
        from phalanx.report.progress import Damages, progress
        from phalanx.report.tables import PlainConsole

        job: Job = load_job(one.reference)  # now: another combination may have changed what its file holds
        self.best = self.best or job.best
        plan = one.plan or choose(job).plan
        run = RunSpec(job=one.reference, plan=plan, folder=folder, steps=self.steps)
        console = PlainConsole(stderr=True)
        shown = frozenset({"start", "warning", "straggler", "ended_early", "restart"})
        viewer = Damages(console) if self.quiet else progress(console, label=label, lines=shown)
        with Follower(folder / "events.jsonl", [viewer]) as follower:
            fit(job, run=run, watch=follower)
        return plan
