"""``phalanx train``: one job, one plan, one run folder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.options import job_argument
from phalanx.cli.output import STOPPED, json_option, print_json
from phalanx.cli.run_options import RunCommand, run_options
from phalanx.cli.settings import Given, earlier_run, params_settings, settle
from phalanx.cli.way_on import way_on
from phalanx.config import Job, RunSpec
from phalanx.config.run import override
from phalanx.config.run_files import EVENTS
from phalanx.errors import RunError

if TYPE_CHECKING:
    from phalanx.events.following import Follower
    from phalanx.launch import Launcher


@click.command("train", short_help="Train a job under a plan.", cls=RunCommand)
@job_argument
@run_options
@click.option(
    "--launcher", default="local", show_default=True, help="What starts the workers: local, torchrun, ssh:FILE."
)
@click.option("--tensorboard", is_flag=True, help="Write TensorBoard files into the run folder, too.")
@click.option("--quiet", is_flag=True, help="Show neither plan nor progress.")
@click.option("--explain", is_flag=True, help="Show where each value came from.")
@json_option
def command(
    job: str, launcher: str, tensorboard: bool, quiet: bool, explain: bool, as_json: bool, **options: Any
) -> None:
    """Train JOB: a Python file with a function job(), file.py:name, or package.module:name.

    Without --plan and -n the planner chooses for the CUDA devices here; where there is none it is one process. A plan
    that is forecast not to fit into memory is refused. On --resume, what is not given is taken from the run's own
    run.toml.

    \b
    Examples:
      phalanx train examples/digits.py -n 2
      phalanx train examples/digits.py -n 1:4 --restarts 10
      phalanx train examples/gpt.py --plan "fsdp=2 zero=3 micro=8" --steps 100
      phalanx train examples/digits.py --run runs/digits-1 --resume --epochs 10
    """
    from phalanx.launch import find_launcher

    given = Given.of(job, options)
    train(given, launcher, find_launcher(launcher), RunDisplay(tensorboard, quiet, explain, as_json))


@dataclass(frozen=True, slots=True)
class RunDisplay:
    """What is shown of a run, and how."""

    tensorboard: bool = False
    quiet: bool = False
    explain: bool = False
    as_json: bool = False


def train(given: Given, name: str, launcher: Launcher, how: RunDisplay) -> None:
    """Train what is ``given`` by ``launcher``, which users call ``name``. Raises as ``fit`` does."""
    earlier, job = earlier_run(given), given.job

    from phalanx.launch import load_job
    from phalanx.launch.jobfile import declared_values, going_on

    own = job
    if earlier:
        job = going_on(job, earlier.job)
        given = replace(given, job=job)

    loaded = load_job(job)
    run, settings = settle(given, earlier, loaded)
    settings += params_settings(job, declared_values(job), "argument" if own == job else "run file")

    from rich.console import Group

    from phalanx.api import fit
    from phalanx.report.tables import settings_table

    output = _Output(loaded, run, quiet=how.quiet)
    output.offer_scaling()
    for setting in settings:
        if setting.why and not how.quiet:
            output.say(f"{setting.why}\n")
    if how.explain and not how.as_json:
        output.say(settings_table(settings))
    with _told_how_to_go_on(run, name), output.follow(tensorboard=how.tensorboard) as follower:
        fit(loaded, run=run, watch=follower, launcher=launcher)

    from phalanx.report.comparison import beside_table
    from phalanx.report.samples_seen import samples_seen
    from phalanx.report.summary import summarise
    from phalanx.report.tables import summary_table

    summary, samples = summarise(run.folder), samples_seen(run.folder)
    if how.as_json:
        explained = {"settings": [{"name": s.name, "value": s.value, "from": s.source} for s in settings]}
        print_json({**summary.to_dict(), "seen_once": samples.once, **(explained if how.explain else {})})
    else:
        output.answer(Group(summary_table(summary, samples), *beside_table(summary, brief=True)))


class _Output:
    """What one run says: the answer on stdout, everything before it on stderr."""

    def __init__(self, job: Job, run: RunSpec, *, quiet: bool) -> None:
        from phalanx.report.tables import PlainConsole

        self._job, self._run, self._quiet = job, run, quiet
        self._stderr = PlainConsole(stderr=True)

    def say(self, something: Any) -> None:
        """Show something on the way."""
        self._stderr.print(something, highlight=False)

    def answer(self, something: Any) -> None:
        """Show the result."""
        from phalanx.report.tables import PlainConsole

        if not self._quiet:
            self._stderr.print()
        PlainConsole().print(something, highlight=False)

    def offer_scaling(self) -> None:
        """Where the user changed the batch: what the usual rules make of the learning rate."""
        from phalanx.train.batch_scaling import scaling_offer

        offer = scaling_offer(self._job.batch, self._run.batch or self._job.batch)
        if offer and self._run.lr_scale == 1.0 and not self._quiet:
            click.echo(f"{offer}\n", err=True)

    def follow(self, *, tensorboard: bool) -> Follower:
        """What shows the run while it goes on: the plan, then its progress; of a quiet one what is damaged."""
        from phalanx.events.following import Follower, Viewer
        from phalanx.report.progress import Damages, Opening, progress
        from phalanx.report.trackers import TensorBoard

        viewers: list[Viewer] = [Damages(self._stderr)]
        if not self._quiet:
            viewers = [Opening(self._stderr, self._drawn()), progress(self._stderr)]
        if tensorboard:
            viewers.append(TensorBoard(self._run.folder / "tensorboard"))
        return Follower(self._run.folder / EVENTS, viewers)

    def _drawn(self) -> str:
        from phalanx.launch import ElasticSize
        from phalanx.parallel import device_kind
        from phalanx.report.drawing import draw

        plan, batch, others = self._run.plan, self._run.batch or self._job.batch, ""
        if self._run.devices:
            size = ElasticSize.of(override(self._job, self._run), self._run)
            plan, others = size.plan, f"begins with {size.devices} of {size.numbers} devices\n"
        drawn = draw(plan, batch=batch, device=device_kind(plan), width=self._stderr.width)
        return f"{self._job.name} under {drawn}\n{others}"


@contextmanager
def _told_how_to_go_on(run: RunSpec, launcher: str) -> Iterator[None]:
    """Where a run ends early: say where it is, and how to go on if there is something to go on from.

    A run that came to its end as it was asked to stop has nothing to go on from, and has ended like any other.
    """
    began = time.time()
    try:
        yield
    except RunError as error:
        if run.folder.is_dir():
            error.add_note(way_on(run, launcher, error))
        raise
    except (KeyboardInterrupt, SystemExit) as stop:
        from phalanx.launch.reaper import SAVED
        from phalanx.report.summary import ended_since

        if (isinstance(stop, KeyboardInterrupt) or stop.code == SAVED) and ended_since(run.folder, began):
            return
        click.echo(f"stopped. {way_on(run, launcher)}", err=True)
        raise SystemExit(STOPPED if isinstance(stop, KeyboardInterrupt) else stop.code) from None
