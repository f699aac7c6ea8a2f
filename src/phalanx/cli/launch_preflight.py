"""What ``phalanx launch`` says before anything starts: the plan that it chose, and what training would fail by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from phalanx.cli.output import answer
from phalanx.cli.settings import Given, earlier_run, plan_of
from phalanx.units import show_names

if TYPE_CHECKING:
    from phalanx.launch.targets import Target
    from phalanx.preflight.launch_check import LaunchCheck

_NO = 1


def looked_ahead(
    target: Target, given: Given, options: Mapping[str, str], *, checks: bool, quiet: bool, as_json: bool
) -> Given:
    """``given``, with the plan for what is there where it has none; ends the command where training would fail there.

    ``options``: the target's own; ``checks``: whether to look at all.

    Raises:
        SpecError: the plan needs more than there is.
    """
    from phalanx.launch import load_job
    from phalanx.launch.targets import AttachedTarget
    from phalanx.preflight.before_launch import before_launch
    from phalanx.preflight.launch_check import LaunchQuestion

    earlier = earlier_run(given)
    chooses = given.plan is None and given.devices is None and earlier is None
    if not (checks or chooses):
        return given
    job = load_job(given.job)
    job = replace(job, batch=given.values.get("batch") or job.batch)
    question = LaunchQuestion(
        reference=given.job,
        plan=None if chooses else plan_of(given, earlier, job.batch)[0],
        folder=given.folder or Path("runs"),
        target=target,
        options=options,
    )
    found = before_launch(question, job, checks=checks, chooses=chooses)
    if found.check:
        _tell(found.check, given, target, quiet=quiet, as_json=as_json)
    if found.choice and found.choice.why and not quiet and not isinstance(target, AttachedTarget):
        click.echo(f"{found.choice.why}\n", err=True)  # who follows a run says so with its settings
    return replace(given, chosen=found.choice)


def _tell(check: LaunchCheck, given: Given, target: Target, *, quiet: bool, as_json: bool) -> None:
    """Show what fails as ``phalanx check`` does, and end; else what only costs time, a line each."""
    from phalanx.report.host_table import host_table

    if check.would_fail:
        told = {"job": given.job, "to": target.name, **check.to_dict()}
        answer(as_json, told, lambda _: host_table(told))
        if not as_json:
            click.echo("not launched; --no-check launches without looking", err=True)
        raise click.exceptions.Exit(_NO)
    if not quiet:
        for one in check.findings:
            click.echo(f"note: {show_names(one.hosts) or target.name}: {one.what}", err=True)
