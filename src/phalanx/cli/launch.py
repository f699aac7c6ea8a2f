"""``phalanx launch``: a run handed to hosts or a queue."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.launch_preflight import looked_ahead
from phalanx.cli.options import job_argument
from phalanx.cli.output import json_option, print_json
from phalanx.cli.run_options import RunCommand, run_options
from phalanx.cli.settings import Given, earlier_run, settle
from phalanx.config import Job, RunSpec
from phalanx.config.run import override
from phalanx.errors import SpecError

if TYPE_CHECKING:
    from phalanx.launch.targets import AttachedTarget, QueueTarget, Submission, Target


class _LaunchCommand(RunCommand):
    """Below its own options ``--help`` has those of each target."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from phalanx.launch.targets import TARGETS, target_class

        super().format_options(ctx, formatter)
        for name in TARGETS:
            options = target_class(name).options
            if options:
                with formatter.section(f"Options of --to {name}"):
                    formatter.write_dl([(f"--{key} {one.example}", one.help) for key, one in options.items()])


@click.command(
    "launch",
    short_help="Hand a job to hosts by SSH, Slurm, Kubernetes, Ray or SageMaker.",
    cls=_LaunchCommand,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
@job_argument
@run_options
@click.option("--to", required=True, metavar="TARGET", help="ssh:hosts.toml, slurm, kubernetes, ray or sagemaker.")
@click.option("--python", help="The interpreter on the other side [this one's path; in an image: python].")
@click.option("--dry-run", is_flag=True, help="Show in full what would be written and run, and do nothing.")
@click.option("--no-check", is_flag=True, help="Do not look first whether training would fail there.")
@click.option("--quiet", is_flag=True, help="Show neither plan nor progress.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    job: str,
    to: str,
    python: str | None,
    dry_run: bool,
    no_check: bool,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Train JOB elsewhere: on hosts that a file names (--to ssh:hosts.toml), or handed over (--to slurm and the like).

    To SageMaker and Ray, and to hosts by SSH that have it not, the job's folder is sent, and what of the run such hosts
    do not share comes here; Slurm and Kubernetes have to have the job's file and the run folder at the same place. A
    run by SSH is followed from here and ends with this command. A queue takes the run and this command ends: phalanx
    status, logs and stop find it by its folder. Options of a target stand beside the run's own.

    Without --plan and -n the planner chooses for what is there, where the target can say that. What phalanx check
    looks at is looked at first: what training would fail by ends the command with exit code 1.

    \b
    Examples:
      phalanx launch train.py --to ssh:hosts.toml --plan "dp=2 fsdp=8"
      phalanx launch train.py --to slurm --nodes 4 --time 12h --plan "fsdp=32"
      phalanx launch train.py --to slurm --nodes 4 --plan dp=32 --dry-run
      phalanx launch train.py --to kubernetes --image train:1 --volume data:/data --plan dp=8
      phalanx launch train.py --to ray://head:10001 --plan "fsdp=8"
    """
    from phalanx.launch.targets import AttachedTarget, QueueTarget, find_target, settled_options

    target = find_target(to)
    own = settled_options(target, ctx.args)
    if python and isinstance(target, AttachedTarget):
        allowed, fix = "python = in the hosts file", f'python = "{python}" in {to.partition(":")[2]}'
        raise SpecError.of("--python", f"{python}, with {target.name}", allowed, fix)
    given, attached = Given.of(job, options), isinstance(target, AttachedTarget)
    if not (dry_run and attached):
        checks = not (no_check or dry_run)
        given = looked_ahead(target, given, own, checks=checks, quiet=quiet, as_json=as_json)
    if not dry_run and isinstance(target, AttachedTarget):
        _follow(target, given, to, quiet=quiet, as_json=as_json)
        return
    run, loaded = _settled(given)
    submission = _submission(target, run, loaded, python or target.python, own)
    prepared = target.prepare(submission)
    if dry_run:
        if as_json:
            files = {str(path): text for path, text in prepared.files.items()}
            print_json({"files": files, "commands": [list(words) for words in prepared.commands]})
        else:
            click.echo(prepared.shown())
        return
    assert isinstance(target, QueueTarget)
    _hand_over(target, run, submission, loaded, to, as_json=as_json)


def _follow(target: AttachedTarget, given: Given, to: str, *, quiet: bool, as_json: bool) -> None:
    """Train what is ``given`` there, and follow it from here; what loads here is loaded while it is reached."""
    target.reach()
    try:
        from phalanx.cli.train import RunDisplay, train

        launcher = target.launcher()
        try:
            train(given, to, launcher, RunDisplay(quiet=quiet, as_json=as_json))
        finally:
            launcher.release()
    finally:
        target.leave()


def _settled(given: Given) -> tuple[RunSpec, Job]:
    """The run as it is asked for, and its job.

    Raises:
        SpecError: neither a plan nor a number of devices is given: those that are here are not those that are there.
    """
    from phalanx.launch import load_job
    from phalanx.launch.jobfile import going_on

    earlier = earlier_run(given)
    if given.plan is None and given.devices is None and given.chosen is None and earlier is None:
        allowed = "a plan: which devices there are is not known here"
        raise SpecError.of("--plan", "none", allowed, '--plan "dp=2 fsdp=8"; phalanx plan JOB --on 2x8xH100 finds one')
    if earlier:
        given = replace(given, job=going_on(given.job, earlier.job))
    loaded = load_job(given.job)
    run, _ = settle(given, earlier, loaded)
    return run, override(loaded, run)


def _submission(target: Target, run: RunSpec, job: Job, python: str, own: dict[str, str]) -> Submission:
    from phalanx.launch.runfile import absolute
    from phalanx.launch.targets import Submission

    if run.from_step is not None:
        given, allowed = f"{run.from_step}, with {target.name}", "not of a target that may start workers again"
        fix = f"phalanx checkpoint prune {run.folder}, or phalanx train JOB --run {run.folder} --from {run.from_step}"
        raise SpecError.of("--from", given, allowed, fix)
    again = replace(absolute(run), resume="auto")  # started again, it goes on
    return Submission(run=again, name=job.name, python=python, options=own)


def _hand_over(target: QueueTarget, run: RunSpec, submission: Submission, job: Job, to: str, *, as_json: bool) -> None:
    """Refuse what ``run``, as it was asked for, cannot begin with; hand it over, and say where it is."""
    from phalanx.launch.runfile import absolute
    from phalanx.launch.targets import one_launch_at_a_time, refuse_handed_over, write_ticket

    folder = submission.run.folder
    refuse_handed_over(folder)
    target.refuse_folder(absolute(run), job)
    refuse_plan(job, submission.run)
    with one_launch_at_a_time(folder):
        refuse_handed_over(folder)  # since it was looked at
        target.refuse_folder(absolute(run), job)
        ticket = target.submit(target.prepare(submission))
        try:
            write_ticket(submission, to, ticket)
        except BaseException:  # nobody could find it again
            target.stop(ticket, folder)
            raise
    shown = _shown(folder)
    if as_json:
        print_json({"folder": str(folder), "to": to, **ticket})
        return
    named = ", ".join(f"{name} {value}" for name, value in ticket.items())
    click.echo(f"handed to {target.name}: {named}\nrun folder: {folder}")
    click.echo(f"    phalanx status {shown} · phalanx logs {shown} · phalanx stop {shown}")


def refuse_plan(job: Job, run: RunSpec) -> None:
    """Refuse a plan that cannot serve the job, by one look at it here.

    Raises:
        SpecError: as of ``phalanx train``.
    """
    from phalanx.launch import look_ahead, settled
    from phalanx.launch.elastic_size import allowed_plans
    from phalanx.train.assembly import refuse
    from phalanx.train.lr_schedule import RunStart

    plan = run.plan.on_any_device
    if within := run.device_range:
        plans = allowed_plans(job, replace(run, plan=plan))
        if within.most not in plans:
            given, most = f"{within} with plan {run.plan}", max(plans)
            raise SpecError.of("-n", given, f"at most {most}, for this job", f"-n {min(within.least, most)}:{most}")
        plan = plans[within.most]
    refuse(job, plan, plan.world_size)
    look_ahead(job, plan, RunStart.of(settled(run)))


def _shown(folder: Path) -> str:
    import shlex

    here = Path.cwd()
    return shlex.quote(str(folder.relative_to(here) if folder.is_relative_to(here) else folder))
