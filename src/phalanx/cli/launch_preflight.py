"""Before ``phalanx launch`` and ``phalanx check`` start: what is asked, its plan, and what training would fail by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from phalanx.cli.output import answer
from phalanx.cli.settings import Given, earlier_run, settle
from phalanx.config import Plan, RunSpec
from phalanx.config.run import override
from phalanx.errors import SpecError
from phalanx.units import show_names

if TYPE_CHECKING:
    from phalanx.launch.targets import Target
    from phalanx.preflight.before_launch import BeforeLaunch
    from phalanx.preflight.launch_check import LaunchCheck, LaunchQuestion

_NO = 1


def refuse_python(target: Target | None, to: str | None, python: str | None) -> None:
    """Refuse an interpreter where the run is not handed over with one.

    Raises:
        SpecError: the run is one of hosts, whose file names it, or of this machine.
    """
    from phalanx.launch.targets import QueueTarget

    if not python or isinstance(target, QueueTarget):
        return
    if target is None or to is None:
        raise SpecError.of("--python", f"{python}, without --to", "of a target", "--to slurm")
    allowed, fix = "python = in the hosts file", f'python = "{python}" in {to.partition(":")[2]}'
    raise SpecError.of("--python", f"{python}, with {target.name}", allowed, fix)


def leaves_plan_open(given: Given) -> bool:
    """Whether neither a plan nor a number of devices is given, and there is no run to go on with."""
    return given.plan is None and given.devices is None and earlier_run(given) is None


def launch_question(
    target: Target | None, given: Given, options: Mapping[str, str], python: str = ""
) -> tuple[LaunchQuestion, RunSpec]:
    """What is to be launched, and its run as it is asked for; where the plan is left open, under one in its place.

    ``options``: the target's own.

    Raises:
        SpecError: with everything that is wrong in the values together, or in the job.
    """
    from phalanx.launch import load_job
    from phalanx.launch.jobfile import going_on
    from phalanx.launch.targets import Submission
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
    from phalanx.preflight.before_launch import before_launch

    found = before_launch(question, checks=checks, chooses=question.plan is None)
    if found.check:
        _tell(found.check, question, quiet=quiet, as_json=as_json)
    return found


def _tell(check: LaunchCheck, question: LaunchQuestion, *, quiet: bool, as_json: bool) -> None:
    """Show what fails as ``phalanx check`` does, and end; else what only costs time, a line each."""
    from phalanx.report.command_tables import host_table

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
