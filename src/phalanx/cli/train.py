"""``phalanx train``: one job, one plan, one run folder; and ``worker``, a worker that another launcher starts."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.options import FILE, RunCommand, job_argument, run_options
from phalanx.cli.output import STOPPED, Answer, json_option
from phalanx.cli.settings import Given, loaded_run
from phalanx.config import Job, RunSpec
from phalanx.config.run import override
from phalanx.config.run_files import CHECKPOINTS, EVENTS
from phalanx.errors import NoneWholeError, PhalanxError, RunError, SpecError, WorkerError
from phalanx.events import RunLog

if TYPE_CHECKING:
    from phalanx.events.following import Viewer


@click.command("train", short_help="Train a job under a plan.", cls=RunCommand)
@job_argument
@run_options
@click.option("--tensorboard", is_flag=True, help="Write TensorBoard files into the run folder, too.")
@click.option("--quiet", is_flag=True, help="Show neither plan nor progress.")
@click.option("--explain", is_flag=True, help="Show the source of each value.")
@json_option
def train_command(job: str, tensorboard: bool, quiet: bool, explain: bool, **options: Any) -> Answer:
    """Train JOB: a Python file with a function job(), file.py:name, or package.module:name.

    Without --plan and -n the planner chooses for the CUDA devices of this machine; without any, one process trains.
    A plan that is forecast not to fit into memory is refused. With --resume, values that are not given are those of
    the run's run.toml.

    \b
    Examples:
      phalanx train examples/digits.py -n 2
      phalanx train examples/digits.py -n 1:4 --restarts 10
      phalanx train examples/gpt.py --plan "fsdp=2 zero=3 micro=8" --steps 100
      phalanx train examples/digits.py --run runs/digits-1 --resume --epochs 10
    """
    return train(Given.of(job, options), "local", quiet=quiet, tensorboard=tensorboard, explain=explain)


def train(given: Given, launcher: str, *, quiet: bool, tensorboard: bool = False, explain: bool = False) -> Answer:
    """Train as ``given`` by ``launcher``, showing plan and progress on stderr. Raises as ``fit`` does."""
    job, run, settings = loaded_run(given)

    from rich.console import Group

    from phalanx.api import fit
    from phalanx.events.following import Follower
    from phalanx.report.comparison import beside_table
    from phalanx.report.progress import Damages, Opening, progress
    from phalanx.report.render import PlainConsole
    from phalanx.report.samples_seen import samples_seen
    from phalanx.report.shown_progress import TensorBoard
    from phalanx.report.summary import summarise
    from phalanx.report.tables import settings_table, summary_table
    from phalanx.train.batch_scaling import scaling_offer

    stderr = PlainConsole(stderr=True)
    if not quiet:
        offer = scaling_offer(job.batch, run.batch or job.batch)
        if offer and run.lr_scale == 1.0:
            click.echo(f"{offer}\n", err=True)
        for setting in settings:
            if setting.why:
                stderr.print(f"{setting.why}\n", highlight=False)
    if explain:
        stderr.print(settings_table(settings), highlight=False)
    viewers: list[Viewer] = [Damages(stderr)]
    if not quiet:
        viewers = [Opening(stderr, _drawn(job, run, stderr.width)), progress(stderr)]
    if tensorboard:
        viewers.append(TensorBoard(run.folder / "tensorboard"))
    with _resume_advice(run, launcher), Follower(run.folder / EVENTS, viewers) as follower:
        fit(job, run=run, watch=follower, launcher=launcher)

    summary, samples = summarise(run.folder), samples_seen(run.folder)
    told = {**summary.to_dict(), "seen_once": samples.once}
    if explain:
        told["settings"] = [{"name": one.name, "value": one.value, "from": one.source} for one in settings]
    if not quiet:
        stderr.print()
    return Answer(told, lambda _: Group(summary_table(summary, samples), *beside_table(summary, brief=True)))


def _drawn(job: Job, run: RunSpec, width: int) -> str:
    from phalanx.launch.restarts import ElasticSize
    from phalanx.parallel import device_kind
    from phalanx.report.drawing import draw

    plan, others = run.plan, ""
    if run.devices:
        size = ElasticSize.of(override(job, run), run)
        plan, others = size.plan, f"begins with {size.devices} of {size.numbers} devices\n"
    drawn = draw(plan, batch=run.batch or job.batch, device=device_kind(plan), width=width)
    return f"{job.name} under {drawn}\n{others}"


@contextmanager
def _resume_advice(run: RunSpec, launcher: str) -> Iterator[None]:
    """Say how to resume if the run within the block ends early."""
    began = time.time()
    try:
        yield
    except RunError as error:
        if run.folder.is_dir():
            error.add_note(_advice(run, launcher, error))
        raise
    except (KeyboardInterrupt, SystemExit) as stop:
        from phalanx.launch.reaper import SAVED

        if (isinstance(stop, KeyboardInterrupt) or stop.code == SAVED) and RunLog(run.folder).ended_since(began):
            return  # it had ended already
        click.echo(f"stopped. {_advice(run, launcher)}", err=True)
        raise SystemExit(STOPPED if isinstance(stop, KeyboardInterrupt) else stop.code) from None


def _advice(run: RunSpec, launcher: str, error: RunError | None = None) -> str:
    if not run.folder.is_dir():
        return "the run has written nothing"
    where = f"run folder: {run.folder}"
    if isinstance(error, NoneWholeError) or getattr(error, "kind", "") == NoneWholeError.__name__:
        from phalanx.launch.runfile import next_free

        copies = f"the copies in {run.mirror} do not help either, or are another run's"
        if run.mirror is None:
            copies = f"with copies elsewhere: {_command(run, launcher, '--resume', '--mirror', 'URL')}"
        anew = _command(run, launcher, folder=next_free(run.folder))
        return f"{where}, all of its checkpoints are damaged\n    try: {anew}, a new run\n    {copies}"
    newest = _newest(run.folder)
    if newest is None:
        return f"{where} (no checkpoint yet)"
    # A failure from outside, such as a signal, needs no mending.
    again = isinstance(error, WorkerError) and not error.kind.startswith("signal ")
    first = "mend the error above, then " if again else ""
    return f"{where}, newest checkpoint: {newest.name}\n    {first}try: {_command(run, launcher, '--resume')}"


def _newest(folder: Path) -> Path | None:
    """Return the newest checkpoint that is complete and that the run has not found damaged."""
    from phalanx.checkpoint import checkpoints
    from phalanx.report.progress import damages

    damaged = set[str]()
    with suppress(PhalanxError, OSError):  # its log may be empty
        for event in RunLog(folder).part:
            if damages(event):
                damaged.add(event["message"].partition(" ")[0])
            elif event["event"] == "checkpoint":  # saved anew in the place of the damaged one
                damaged.discard(Path(event["path"]).name)
    found = checkpoints(folder / CHECKPOINTS)
    return next((one.path for one in found if one.whole and one.path.name not in damaged), None)


def _command(run: RunSpec, launcher: str, *options: str, folder: Path | None = None) -> str:
    verb = ["launch", run.job, "--to", launcher] if ":" in launcher else ["train", run.job]
    mirror = ["--mirror", run.mirror] if run.mirror and "--resume" in options else []
    return shlex.join(["phalanx", *verb, "--run", str(folder or run.folder), *options, *mirror])


@click.command("worker", short_help="Be one worker of a run; for torchrun.")
@click.argument("runfile", type=FILE)
@click.option("--job", default="", help="The job's file here, if not where RUNFILE says.")
@json_option
def worker_command(runfile: Path, job: str) -> Answer:
    """Be one worker of the run that RUNFILE describes.

    torchrun starts a worker for each device and tells each its rank; without torchrun, this is the only worker. The
    plan in the file must be for as many workers as there are.

    \b
    Examples:
      phalanx worker runs/digits-1/run.toml
      torchrun --nproc-per-node 2 --no-python phalanx worker run.toml
    """
    from phalanx.launch.torchrun import place_of_this_process
    from phalanx.launch.worker import main

    code, place = main(runfile, job), None
    with suppress(SpecError):  # main has shown it
        place = place_of_this_process()
    first = place is None or place.rank == 0
    return Answer({"runfile": str(runfile), "exit_code": code} if first else {}, code=code)
