"""``phalanx sweep``: a job with each combination of some values, one run after the other, and which was best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.options import JobReference, PlanText, refuse_params
from phalanx.cli.output import STOPPED, answer, json_option
from phalanx.config import Plan
from phalanx.errors import Problem, SpecError

if TYPE_CHECKING:
    from phalanx.events.following import Follower
    from phalanx.sweep import Combination, SweepRuns

_EXAMPLE = "phalanx sweep train.py --set lr=1e-3,3e-4"


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
def command(job: str, given: tuple[str, ...], plans: tuple[Plan, ...], as_json: bool, **runs: Any) -> None:
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
    from phalanx.report.sweep_rows import sweep_table
    from phalanx.sweep import refuse_values, refuse_within_workers

    refuse_within_workers(f"{_EXAMPLE} --plan dp=2")
    wanted = combinations(job, given, plans)
    refuse_values(wanted)
    sweep = _runs(wanted, **runs)
    code = _train(sweep, wanted)
    told = sweep.result(job).to_dict()
    answer(as_json, told, lambda _: sweep_table(told))
    click.get_current_context().exit(code)


def combinations(job: str, given: Sequence[str], plans: Sequence[Plan]) -> list[Combination]:
    """Each combination of the values ``NAME=VALUE,...`` and the plans, the last name varying fastest.

    Raises:
        SpecError: with everything that is wrong in how they are written.
    """
    from phalanx.sweep import AxisWords, JobSource, axis_problems, combined

    words = AxisWords(
        values="--set", plans="--plan", some_values="--set lr=1e-3,3e-4", some_plans="--plan dp=2", example=_EXAMPLE
    )
    if given:
        refuse_params(job, given[0])
    axes: dict[str, list[str]] = {}
    written: dict[str, str] = {}
    problems: list[Problem] = []
    for text in given:
        name, equals, listed = text.partition("=")
        values = [value.strip() for value in listed.split(",")]
        allowed = ""
        if not equals or not name.isidentifier() or "" in values:
            allowed = "NAME=VALUE,VALUE of a name that the job declares"
        elif name in axes:
            allowed = f"all values of {name} behind one --set"
        if allowed:
            problems.append(Problem(where="--set", given=repr(text), allowed=allowed, fix=words.some_values))
        else:
            axes[name], written[name] = values, repr(text)
    problems += axis_problems(axes, plans, words, written) if axes or not given else []
    if problems:
        raise SpecError(problems)
    return combined(JobSource(reference=job), axes, plans)


def _runs(wanted: Sequence[Combination], *, folder: Path | None, steps: int | None, quiet: bool) -> SweepRuns:
    from phalanx.sweep import SweepRuns, sweep_folder

    where = sweep_folder(wanted[0].source.stem, folder, "--run")

    @contextmanager
    def look(log: Path, label: str) -> Iterator[Follower]:
        from phalanx.events.following import Follower
        from phalanx.report.progress import Damages, progress
        from phalanx.report.render import PlainConsole

        console = PlainConsole(stderr=True)
        shown = frozenset({"start", "warning", "ended_early", "restart"})
        viewer = Damages(console) if quiet else progress(console, label=label, lines=shown)
        with Follower(log, [viewer]) as follower:
            yield follower

    return SweepRuns(folder=where, steps=steps, count=len(wanted), look=look)


def _train(sweep: SweepRuns, wanted: Sequence[Combination]) -> int:
    """Train each, and give the exit code; ends early where it is asked to stop."""
    from phalanx.sweep import FAILED

    try:
        sweep.train(wanted)
    except KeyboardInterrupt:
        return STOPPED
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else FAILED
    return sweep.exit_code
