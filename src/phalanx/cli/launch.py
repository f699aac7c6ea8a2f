"""``phalanx launch``: hand a run to hosts or a queue; ``check``: find reasons why training would fail there."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.options import FLAGS, RunCommand, complete_file, job_argument, run_options, set_option
from phalanx.cli.output import NO, Answer, json_option
from phalanx.cli.settings import Given, earlier_run, loaded_run
from phalanx.cli.train import train
from phalanx.config import Plan, RunSpec
from phalanx.config.run import override
from phalanx.errors import PhalanxError, SpecError
from phalanx.units import show_names

if TYPE_CHECKING:
    from phalanx.launch.targets.target import QueueTarget, Submission, Target
    from phalanx.preflight.launch_check import LaunchCheck, LaunchQuestion

_WITHOUT_JOB = ("plan", "folder")  # options of a run that a check of hosts alone takes, too
_TARGET_OPTIONS = {"ignore_unknown_options": True, "allow_extra_args": True}


class _LaunchCommand(RunCommand):
    """Below its own options ``--help`` has those of each target."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from phalanx.launch.targets.find_target import TARGETS, target_class

        super().format_options(ctx, formatter)
        for name in TARGETS:
            if options := target_class(name).options:
                with formatter.section(f"Options of --to {name}"):
                    formatter.write_dl([(f"--{key} {one.example}", one.help) for key, one in options.items()])


_python_option = click.option("--python", help="The interpreter there [this one's path; in an image: python].")


@click.command(
    "launch",
    short_help="Hand a job to hosts by SSH, a queue or a cloud.",
    cls=_LaunchCommand,
    context_settings=_TARGET_OPTIONS,
)
@job_argument
@run_options
@click.option("--to", required=True, metavar="TARGET", help="Where: ssh:hosts.toml, or a name from the lists below.")
@_python_option
@click.option("--dry-run", is_flag=True, help="Show all that would be written and run, and do nothing.")
@click.option("--no-check", is_flag=True, help="Launch without checking the target.")
@click.option("--quiet", is_flag=True, help="Show neither plan nor progress.")
@json_option
def launch_command(
    job: str, to: str, python: str | None, dry_run: bool, no_check: bool, quiet: bool, **options: Any
) -> Answer:
    """Train JOB elsewhere: on the hosts of a file (--to ssh:hosts.toml), or by a queue (--to slurm and the like).

    Targets with the option --code are sent the job's folder; others need the job's file and the run folder at the same
    paths as here. A run by SSH is followed from here and ends with this command. A queue takes the
    run, and this command ends: phalanx status, logs and stop find it by its folder.

    Without --plan and -n the planner chooses for the target's devices, if the target can name them. phalanx check
    runs first; exit code 1 if it finds a reason why training would fail.

    \b
    Examples:
      phalanx launch train.py --to ssh:hosts.toml --plan "dp=2 fsdp=8"
      phalanx launch train.py --to slurm --nodes 4 --plan dp=32 --dry-run
      phalanx launch /data/train.py --to kubernetes --image train:1 --volume data:/data --run /data/runs/1 --plan dp=8
      phalanx launch train.py --to ray:http://head:8265 --plan "fsdp=8"
      phalanx launch train.py --to sky:gpus=H100:8,cloud=aws,spot --plan "fsdp=8" --mirror s3://bucket/runs/1
    """
    from phalanx.launch.targets.find_target import find_target, settled_options
    from phalanx.launch.targets.target import AttachedTarget, QueueTarget
    from phalanx.preflight.launch_check import before_launch, refuse_plan

    target, given = find_target(to), Given.of(job, options)
    own = settled_options(target, click.get_current_context().args)
    _refuse_python(target, to, python)
    question, run = launch_question(target, given, own, python or "")
    if isinstance(target, QueueTarget) and not dry_run:
        _refuse_folder(target, run, question)
    found = before_launch(question, checks=not (no_check or dry_run), chooses=question.plan is None)
    if found.check and found.check.would_fail:
        click.echo("not launched; --no-check launches without checking", err=True)
        return _checked(question, found.check, to=target.name)
    if found.check and not quiet:
        for one in found.check.findings:
            click.echo(f"note: {show_names(one.hosts) or target.name}: {one.what}", err=True)
    if isinstance(target, AttachedTarget) and not dry_run:
        return train(replace(given, chosen=found.choice), to, quiet=quiet)
    plan = found.choice.plan if found.choice else question.plan
    if plan is None:
        allowed = "a plan: which devices there are is not known here"
        raise SpecError.of("--plan", "none", allowed, '--plan "dp=2 fsdp=8"; phalanx plan JOB --on 2x8xH100 finds one')
    if found.choice and found.choice.why and not quiet:
        click.echo(f"{found.choice.why}\n", err=True)
    submission = question.under(plan)
    if dry_run:
        prepared = target.prepare(submission)
        return Answer(prepared.to_dict(), prepared.shown())
    assert isinstance(target, QueueTarget)
    assert question.job
    if not found.check:
        refuse_plan(question.job, submission.run, target)
    return _hand_over(target, run, submission, question, to)


def launch_question(
    target: Target | None, given: Given, options: Mapping[str, str], python: str = ""
) -> tuple[LaunchQuestion, RunSpec]:
    """Return the launch, with the target's own ``options``, and its run, on one device without a plan."""
    from phalanx.launch.targets.target import Submission
    from phalanx.preflight.launch_check import LaunchQuestion

    chooses = given.plan is None and given.devices is None and earlier_run(given) is None
    job, run, _ = loaded_run(replace(given, plan=Plan() if chooses else given.plan))
    job, plan = override(job, run), None if chooses else run.plan
    handed = Submission.of(run, job, target, python=python, options=options)
    place: dict[str, Any] = {"plan": plan, "folder": run.folder, "target": target}
    return LaunchQuestion(reference=run.job, job=job, submission=handed, **place), run


def _refuse_folder(target: QueueTarget, run: RunSpec, question: LaunchQuestion) -> None:
    from phalanx.launch.runfile import absolute
    from phalanx.launch.targets.handed_over import refuse_handed_over

    assert question.job
    refuse_handed_over(absolute(run).folder)
    target.refuse_folder(absolute(run), question.job)


def _hand_over(target: QueueTarget, run: RunSpec, submission: Submission, question: LaunchQuestion, to: str) -> Answer:
    from phalanx.launch.targets.handed_over import one_launch_at_a_time, write_ticket

    folder = submission.run.folder
    with one_launch_at_a_time(folder):
        _refuse_folder(target, run, question)  # it may have been taken since
        ticket = target.submit(target.prepare(submission))
        try:
            write_ticket(submission, to, ticket)
        except BaseException:  # without a ticket the run cannot be found
            target.stop(ticket, folder)
            raise
    shown = shlex.quote(str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder))
    named = ", ".join(f"{name} {value}" for name, value in ticket.items())
    text = f"handed to {target.name}: {named}\nrun folder: {folder}\n"
    next_verbs = f"    phalanx status {shown} · phalanx logs {shown} · phalanx stop {shown}"
    return Answer({"folder": str(folder), "to": to, **ticket}, text + next_verbs)


def _refuse_python(target: Target, to: str, python: str | None) -> None:
    """Raise SpecError if ``--python`` is given for the hosts of a file, which names their interpreters."""
    from phalanx.launch.targets.target import QueueTarget

    if python and not isinstance(target, QueueTarget):
        allowed, fix = "python = in the hosts file", f'python = "{python}" in {to.partition(":")[2]}'
        raise SpecError.of("--python", f"{python}, with {target.name}", allowed, fix)


def _checked(question: LaunchQuestion, check: LaunchCheck, *, to: str, **more: Any) -> Answer:
    from phalanx.report.tables import host_table

    told = {"job": question.reference, "to": to, **check.to_dict(), **more}
    return Answer(told, lambda _: host_table(told), NO if check.would_fail else 0)


@click.command(
    "check",
    short_help="Would training fail there? Hosts, links, folder, data.",
    cls=RunCommand,
    context_settings=_TARGET_OPTIONS,
)
@click.argument("job", required=False, default="", shell_complete=complete_file)
@set_option("job")
@click.option("--to", metavar="TARGET", help="Where, as phalanx launch has it: ssh:hosts.toml, slurm [this machine].")
@run_options
@_python_option
@json_option
def check_command(job: str, to: str | None, python: str | None, **options: Any) -> Answer:
    """Check each host of a run, and the links between hosts, in under a minute.

    On each host: Python, torch, NCCL and the job's imports, free devices, system limits and the clock. Also the run
    folder, the job and its first sample. Between hosts: connections and their speed. Without JOB only hosts are
    checked. For a queue this machine is checked, and the queue is asked if it would take the run. Options are those of
    phalanx launch.

    Exit code 0: no reason was found why training would fail. 1: there is one; each comes with a way out.

    \b
    Examples:
      phalanx check
      phalanx check train.py --to ssh:hosts.toml --run /shared/runs/1
      phalanx check train.py --to slurm --nodes 4 --time 12h --plan fsdp=32
    """
    from phalanx.launch.targets.find_target import find_target, settled_options
    from phalanx.preflight.launch_check import launch_check

    words = click.get_current_context().args
    if job.startswith("-"):  # an option of a target, without JOB
        job, words = "", [job, *words]
    target = find_target(to) if to else None
    own: Mapping[str, str] = {}
    if target and to:
        own = settled_options(target, words)
        _refuse_python(target, to, python)
    elif words or python:
        raise click.UsageError(f"No such option without --to: {(words or ['--python'])[0]}")
    for name, value in {**options, "python": python}.items():
        if not job and value is not None and name not in _WITHOUT_JOB:
            flag = "--anyway or --no-forecast" if name == "forecast" else FLAGS.get(name, "--python")
            raise click.UsageError(f"{flag}: of a run, and no JOB was named")
    began = time.monotonic()
    question = _check_question(target, Given.of(job, options), own, python or "")
    found = launch_check(question)
    return _checked(replace(question, reference=job), found, to=to or "", seconds=time.monotonic() - began)


def _check_question(target: Target | None, given: Given, own: Mapping[str, str], python: str) -> LaunchQuestion:
    """Return the launch; only its place without a job, or if the job does not load here: hosts say more of it."""
    from phalanx.launch.jobfile import load_job
    from phalanx.preflight.launch_check import LaunchQuestion

    where = LaunchQuestion(reference=given.job, plan=given.plan, folder=given.folder or Path("runs"), target=target)
    if not given.job:
        return where
    try:
        load_job(given.job)
    except PhalanxError:
        return where
    return launch_question(target, given, own, python)[0]
