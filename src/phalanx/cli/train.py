"""``phalanx train``: one job, one plan, one run folder."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.options import RunCommand, job_argument, run_options
from phalanx.cli.output import STOPPED, json_option, print_json
from phalanx.cli.settings import Given, earlier_run, params_settings, settle
from phalanx.config import Job, RunSpec
from phalanx.config.run import override
from phalanx.config.run_files import CHECKPOINTS, EVENTS
from phalanx.errors import NoneWholeError, PhalanxError, RunError, WorkerError
from phalanx.events import RunLog

if TYPE_CHECKING:
    from phalanx.events.following import Follower


@click.command("train", short_help="Train a job under a plan.", cls=RunCommand)
@job_argument
@run_options
@click.option("--tensorboard", is_flag=True, help="Write TensorBoard files into the run folder, too.")
@click.option("--quiet", is_flag=True, help="Show neither plan nor progress.")
@click.option("--explain", is_flag=True, help="Show where each value came from.")
@json_option
def command(job: str, tensorboard: bool, quiet: bool, explain: bool, as_json: bool, **options: Any) -> None:
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

    given = Given.of(job, options)
    train(given, "local", RunDisplay(tensorboard, quiet, explain, as_json))


@dataclass(frozen=True, slots=True)
class RunDisplay:
    """What is shown of a run, and how."""

    tensorboard: bool = False
    quiet: bool = False
    explain: bool = False
    as_json: bool = False


def train(given: Given, launcher: str, how: RunDisplay) -> None:
    """Train what is ``given`` by ``launcher``. Raises as ``fit`` does."""
    earlier, job = earlier_run(given), given.job

    from phalanx.launch.jobfile import declared_values, going_on, load_job

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
    with _told_how_to_go_on(run, launcher), output.follow(tensorboard=how.tensorboard) as follower:
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
        from phalanx.report.render import PlainConsole

        self._job, self._run, self._quiet = job, run, quiet
        self._stderr = PlainConsole(stderr=True)

    def say(self, something: Any) -> None:
        """Show something on the way."""
        self._stderr.print(something, highlight=False)

    def answer(self, something: Any) -> None:
        """Show the result."""
        from phalanx.report.render import PlainConsole

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
        from phalanx.report.shown_progress import TensorBoard

        viewers: list[Viewer] = [Damages(self._stderr)]
        if not self._quiet:
            viewers = [Opening(self._stderr, self._drawn()), progress(self._stderr)]
        if tensorboard:
            viewers.append(TensorBoard(self._run.folder / "tensorboard"))
        return Follower(self._run.folder / EVENTS, viewers)

    def _drawn(self) -> str:
        from phalanx.launch.restarts import ElasticSize
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

        if (isinstance(stop, KeyboardInterrupt) or stop.code == SAVED) and RunLog(run.folder).ended_since(began):
            return
        click.echo(f"stopped. {way_on(run, launcher)}", err=True)
        raise SystemExit(STOPPED if isinstance(stop, KeyboardInterrupt) else stop.code) from None


def way_on(run: RunSpec, launcher: str, error: RunError | None = None) -> str:
    """Where the folder of a run that ended early is, and the command that goes on with it.

    ``error``: what it failed by. Where that would come again, it is to be mended first.
    """
    if not run.folder.is_dir():
        return "nothing of it was written"
    where = f"run folder: {run.folder}"
    if isinstance(error, NoneWholeError) or getattr(error, "kind", "") == NoneWholeError.__name__:
        return f"{where}, of which no checkpoint is whole\n    {_without_checkpoint(run, launcher)}"
    newest = _newest(run.folder)
    if newest is None:
        return f"{where} (no checkpoint yet)"
    # What came from outside, such as a signal, is nothing to be mended.
    again = isinstance(error, WorkerError) and not error.kind.startswith("signal ")
    first = "once what is named above is mended, " if again else ""
    return f"{where}, newest checkpoint: {newest.name}\n    {first}try: {_command(run, launcher, '--resume')}"


def _newest(folder: Path) -> Path | None:
    """The newest checkpoint that is complete and that the run has not found damaged as it went on."""
    from phalanx.checkpoint import checkpoints
    from phalanx.report.progress import damages

    damaged = set[str]()
    with suppress(PhalanxError, OSError):  # its log may say nothing yet
        for event in RunLog(folder).part:
            if damages(event):
                damaged.add(event["message"].partition(" ")[0])
            elif event["event"] == "checkpoint":  # of that step once more, in the place of the damaged one
                damaged.discard(Path(event["path"]).name)
    found = checkpoints(folder / CHECKPOINTS)
    return next((one.path for one in found if one.whole and one.path.name not in damaged), None)


def _without_checkpoint(run: RunSpec, launcher: str) -> str:
    """What can be done about a run of which no checkpoint is whole."""
    from phalanx.launch.runfile import next_free

    anew = _command(run, launcher, folder=next_free(run.folder))
    copies = f"the copies in {run.mirror} do not help either, or are another run's"
    if run.mirror is None:
        copies = f"with copies elsewhere: {_command(run, launcher, '--resume', '--mirror', 'URL')}"
    return f"try: {anew}, a new run\n    {copies}"


def _command(run: RunSpec, launcher: str, *options: str, folder: Path | None = None) -> str:
    """The command that goes on with ``run``; what it does not say stands in the run file."""
    mirror = ["--mirror", run.mirror] if run.mirror and "--resume" in options else []
    words = ["phalanx", "train", run.job, "--run", str(folder or run.folder), *options, *mirror]
    if ":" in launcher:  # hosts of a file
        words[1:3] = ["launch", run.job, "--to", launcher]
    return shlex.join(words)
