"""``phalanx launch``: a run handed to hosts or a queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.options import RunCommand, job_argument, run_options
from phalanx.cli.output import answer, json_option, print_json, show_prepared
from phalanx.cli.settings import Given, earlier_run, settle
from phalanx.config import Plan, RunSpec
from phalanx.config.run import override
from phalanx.errors import SpecError
from phalanx.units import show_names

if TYPE_CHECKING:
    from phalanx.launch.targets.target import QueueTarget, Submission, Target
    from phalanx.preflight import PlanChoice
    from phalanx.preflight.launch_check import BeforeLaunch, LaunchCheck, LaunchQuestion

_NO = 1


class _LaunchCommand(RunCommand):
    """Below its own options ``--help`` has those of each target."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from phalanx.launch.targets.find_target import TARGETS, target_class

        super().format_options(ctx, formatter)
        for name in TARGETS:
            if options := target_class(name).options:
                with formatter.section(f"Options of --to {name}"):
                    formatter.write_dl([(f"--{key} {one.example}", one.help) for key, one in options.items()])


@click.command(
    "launch",
    short_help="Hand a job to hosts by SSH, a queue or a cloud.",
    cls=_LaunchCommand,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
@job_argument
@run_options
@click.option("--to", required=True, metavar="TARGET", help="Where: ssh:hosts.toml, or a name from the lists below.")
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

    Targets with the option --code are sent the job's folder; others need the job's file and the run folder at the same
    paths as here. A run by SSH is followed from here and ends with this command. A queue takes the run and this command
    ends: phalanx status, logs and stop find it by its folder. Options of a target stand beside the run's own.

    Without --plan and -n the planner chooses for what is there, where the target can say that. What phalanx check
    looks at is looked at first: what training would fail by ends the command with exit code 1.

    \b
    Examples:
      phalanx launch train.py --to ssh:hosts.toml --plan "dp=2 fsdp=8"
      phalanx launch train.py --to slurm --nodes 4 --time 12h --plan "fsdp=32"
      phalanx launch train.py --to slurm --nodes 4 --plan dp=32 --dry-run
      phalanx launch /data/train.py --to kubernetes --image train:1 --volume data:/data --run /data/runs/1 --plan dp=8
      phalanx launch train.py --to ray:http://head:8265 --plan "fsdp=8"
      phalanx launch train.py --to sky:gpus=H100:8,cloud=aws,spot --plan "fsdp=8" --mirror s3://bucket/runs/1
    """
    from phalanx.cli.train import RunDisplay, train
    from phalanx.launch.targets.find_target import find_target, settled_options
    from phalanx.launch.targets.target import AttachedTarget, QueueTarget

    target = find_target(to)
    own = settled_options(target, ctx.args)
    refuse_python(target, to, python)
    given, checks = Given.of(job, options), not (no_check or dry_run)
    if isinstance(target, AttachedTarget) and not (dry_run or checks or leaves_plan_open(given)):
        train(given, to, RunDisplay(quiet=quiet, as_json=as_json))
        return
    question, run = launch_question(target, given, own, python or "")
    if isinstance(target, QueueTarget) and not dry_run:
        _refuse_folder(target, run, question)
    found = looked_ahead(question, checks=checks, quiet=quiet, as_json=as_json)
    if isinstance(target, AttachedTarget) and not dry_run:
        given = replace(given, chosen=found.choice)  # which says why that plan
        train(given, to, RunDisplay(quiet=quiet, as_json=as_json))
        return
    submission = _under_its_plan(question, found.choice, quiet=quiet)
    if dry_run:
        show_prepared(target.prepare(submission), as_json=as_json)
        return
    assert isinstance(target, QueueTarget)
    if not found.check:
        from phalanx.preflight.launch_check import refuse_plan

        assert question.job
        refuse_plan(question.job, submission.run, target)
    _hand_over(target, run, submission, question, to, as_json=as_json)


def _under_its_plan(question: LaunchQuestion, choice: PlanChoice | None, *, quiet: bool) -> Submission:
    """What is handed over, under the plan that was asked for or chosen; says why it was.

    Raises:
        SpecError: neither: the devices that are here are not those that are there.
    """
    plan = choice.plan if choice else question.plan
    if plan is None:
        allowed = "a plan: which devices there are is not known here"
        raise SpecError.of("--plan", "none", allowed, '--plan "dp=2 fsdp=8"; phalanx plan JOB --on 2x8xH100 finds one')
    if choice and choice.why and not quiet:
        click.echo(f"{choice.why}\n", err=True)
    return question.under(plan)


def _refuse_folder(target: QueueTarget, run: RunSpec, question: LaunchQuestion) -> None:
    """Refuse the folder of ``run``, as it was asked for, if it cannot begin in it, or is handed over already."""
    from phalanx.launch.runfile import absolute
    from phalanx.launch.targets.handed_over import refuse_handed_over

    assert question.job
    refuse_handed_over(absolute(run).folder)
    target.refuse_folder(absolute(run), question.job)


def _hand_over(
    target: QueueTarget, run: RunSpec, submission: Submission, question: LaunchQuestion, to: str, *, as_json: bool
) -> None:
    """Hand the run over, and say where it is."""
    from phalanx.launch.targets.handed_over import one_launch_at_a_time, write_ticket

    folder = submission.run.folder
    with one_launch_at_a_time(folder):
        _refuse_folder(target, run, question)  # since it was looked at
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


def _shown(folder: Path) -> str:
    import shlex

    here = Path.cwd()
    return shlex.quote(str(folder.relative_to(here) if folder.is_relative_to(here) else folder))


def refuse_python(target: Target | None, to: str | None, python: str | None) -> None:
    """Refuse an interpreter where the run is not handed over with one.

    Raises:
        SpecError: the run is one of hosts, whose file names it, or of this machine.
    """
    from phalanx.launch.targets.target import QueueTarget

    if not python or isinstance(target, QueueTarget):
        return
    if target is None or to is None:
        raise SpecError.of("--python", f"{python}, without --to", "of a target", "--to slurm")
    allowed, fix = "python = in the hosts file", f'python = "{python}" in {to.partition(":")[2]}'
    raise SpecError.of("--python", f"{python}, with {target.name}", allowed, fix)


def leaves_plan_open(given: Given) -> bool:
    """Return True if neither a plan nor a number of devices is given, and there is no run to go on with."""
    return given.plan is None and given.devices is None and earlier_run(given) is None


def launch_question(
    target: Target | None, given: Given, options: Mapping[str, str], python: str = ""
) -> tuple[LaunchQuestion, RunSpec]:
    """What is to be launched, and its run as it is asked for; where the plan is left open, under one in its place.

    ``options``: the target's own.

    Raises:
        SpecError: with everything that is wrong in the values together, or in the job.
    """
    from phalanx.launch.jobfile import going_on, load_job
    from phalanx.launch.targets.target import Submission
    from phalanx.preflight.launch_check import LaunchQuestion

    chooses, earlier = leaves_plan_open(given), earlier_run(given)
    reference = going_on(given.job, earlier.job) if earlier else given.job
    loaded = load_job(reference)
    run, _ = settle(replace(given, job=reference, plan=Plan() if chooses else given.plan), earlier, loaded)
    job = override(loaded, run)
    question = LaunchQuestion(
        reference=reference,
        job=job,
        submission=Submission.of(run, job, target, python=python, options=options),
        plan=None if chooses else run.plan,
        folder=run.folder,
        target=target,
    )
    return question, run


def looked_ahead(question: LaunchQuestion, *, checks: bool, quiet: bool, as_json: bool) -> BeforeLaunch:
    """The plan for what is there where none was asked for, and the check; ends the command where training would fail.

    ``checks``: whether to look at all.

    Raises:
        SpecError: the plan needs more than there is.
    """
    from phalanx.preflight.launch_check import before_launch

    found = before_launch(question, checks=checks, chooses=question.plan is None)
    if found.check:
        _tell(found.check, question, quiet=quiet, as_json=as_json)
    return found


def _tell(check: LaunchCheck, question: LaunchQuestion, *, quiet: bool, as_json: bool) -> None:
    """Show what fails as ``phalanx check`` does, and end; else what only costs time, a line each."""
    from phalanx.report.tables import host_table

    to = question.target.name if question.target else ""
    if check.would_fail:
        told = {"job": question.reference, "to": to, **check.to_dict()}
        answer(as_json, told, lambda _: host_table(told))
        if not as_json:
            click.echo("not launched; --no-check launches without looking", err=True)
        raise click.exceptions.Exit(_NO)
    if not quiet:
        for one in check.findings:
            click.echo(f"note: {show_names(one.hosts) or to}: {one.what}", err=True)
