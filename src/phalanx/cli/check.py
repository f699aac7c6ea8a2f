"""``phalanx check``: would training fail there, and what to do, before anything is started."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.launch import launch_question, refuse_python
from phalanx.cli.options import JobReference, RunCommand, run_options, set_option
from phalanx.cli.output import answer, json_option
from phalanx.cli.settings import Given
from phalanx.errors import PhalanxError

if TYPE_CHECKING:
    from phalanx.launch.targets.target import Target
    from phalanx.preflight.launch_check import LaunchQuestion

_NO = 1
_WITHOUT_JOB = ("plan", "folder")  # of a run: what is looked at on hosts alone, too


@click.command(
    "check",
    short_help="Would training fail there? Hosts, links, folder, data.",
    cls=RunCommand,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
@click.argument("job", required=False, default="", type=JobReference())
@set_option("job")
@click.option("--to", metavar="TARGET", help="Where, as phalanx launch has it: ssh:hosts.toml, slurm [this machine].")
@run_options
@click.option("--python", help="The interpreter on the other side [this one's path; in an image: python].")
@json_option
@click.pass_context
def command(ctx: click.Context, job: str, to: str | None, python: str | None, as_json: bool, **options: Any) -> None:
    """Look at each host that a run would be on, and at the links between them, in under a minute.

    Of each host: Python, torch, NCCL and what the job imports, the devices and what is free of them, limits of the
    system, the clock; whether it sees the same run folder and can write there; whether the job loads and its first
    sample can be read. Between hosts: whether each reaches the others, and how fast. What differs between hosts is
    named by the odd one out. JOB may be left out; then only the hosts are looked at. Of a queue, whose machines are
    not known yet, it looks at this machine and asks whether the queue would take the run. The words are those of
    phalanx launch: the run's own options and, with --to, the target's.

    Exit code 0: nothing was found that training would fail by. 1: something was; each comes with what to do.

    \b
    Examples:
      phalanx check
      phalanx check examples/digits.py --plan dp=2
      phalanx check train.py --to ssh:hosts.toml --run /shared/runs/1
      phalanx check train.py --to slurm --nodes 4 --time 12h --plan fsdp=32
      phalanx check train.py --to ray:http://head:8265 --plan fsdp=8
    """
    from phalanx.launch.targets.find_target import find_target, settled_options
    from phalanx.preflight.launch_check import launch_check
    from phalanx.report.tables import host_table

    words = [*([job] if job.startswith("-") else []), *ctx.args]  # an option of a target, where there is no JOB
    job = "" if job.startswith("-") else job
    target = find_target(to) if to else None
    if words and not target:
        raise click.UsageError(f"{words[0]}: neither an option of this command nor, without --to, of a target")
    own = settled_options(target, words) if target else {}
    refuse_python(target, to, python)
    if not job:
        _refuse_without_job(ctx, {**options, "python": python})
    began = time.monotonic()
    found = launch_check(_question(target, Given.of(job, options), own, python or ""))
    told = {"job": job, "to": to or "", **found.to_dict()}
    answer(as_json, {**told, "seconds": time.monotonic() - began}, lambda _: host_table(told))
    ctx.exit(_NO if found.would_fail else 0)


def _question(target: Target | None, given: Given, own: Mapping[str, str], python: str) -> LaunchQuestion:
    """What would be launched; of a job that does not load here, which hosts say more of, no more than where.

    Raises:
        SpecError: with everything that is wrong in the values of the run together.
    """
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


def _refuse_without_job(ctx: click.Context, given: Mapping[str, Any]) -> None:
    """Refuse what is asked of a run where there is none.

    Raises:
        UsageError: there is something.
    """
    for name, value in given.items():
        if value is not None and name not in _WITHOUT_JOB:
            words = " or ".join(one.opts[0] for one in ctx.command.params if one.name == name)
            raise click.UsageError(f"{words}: of a run, and no JOB was named")
