"""``phalanx check``: would training fail there, and what to do, before anything is started."""

from __future__ import annotations

import time
from pathlib import Path

import click

from phalanx.cli.options import JobReference, PlanText, set_option
from phalanx.cli.output import answer, json_option
from phalanx.config import Plan

_NO = 1


@click.command(
    "check",
    short_help="Would training fail there? Hosts, links, folder, data.",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
@click.argument("job", required=False, default="", type=JobReference())
@set_option("job")
@click.option("--to", metavar="TARGET", help="Where: ssh:hosts.toml, slurm, kubernetes, ray, sagemaker [this machine].")
@click.option("--plan", type=PlanText(), help="The plan it would run under [dp over all devices].")
@click.option("--run", "folder", type=click.Path(path_type=Path), default="runs", help="Run folder [runs].")
@json_option
@click.pass_context
def command(ctx: click.Context, job: str, to: str | None, plan: Plan | None, folder: Path, as_json: bool) -> None:
    """Look at each host that a run would be on, and at the links between them, in under a minute.

    Of each host: Python, torch, NCCL and what the job imports, the devices and what is free of them, limits of the
    system, the clock; whether it sees the same run folder and can write there; whether the job loads and its first
    sample can be read. Between hosts: whether each reaches the others, and how fast. What differs between hosts is
    named by the odd one out. JOB may be left out; then only the hosts are looked at. Of a queue, whose machines are
    not known yet, it looks at this machine and asks whether the queue would take the run; options of the queue stand
    beside the others.

    Exit code 0: nothing was found that training would fail by. 1: something was; each comes with what to do.

    \b
    Examples:
      phalanx check
      phalanx check examples/digits.py --plan dp=2
      phalanx check train.py --to ssh:hosts.toml --run /shared/runs/1
      phalanx check train.py --to slurm --plan fsdp=32
      phalanx check train.py --to ray://head:10001 --plan fsdp=8
    """
    from phalanx.launch.targets import find_target, settled_options
    from phalanx.preflight.launch_check import LaunchQuestion, launch_check
    from phalanx.report.host_table import host_table

    words = [*([job] if job.startswith("-") else []), *ctx.args]  # an option of a target, where there is no JOB
    job = "" if job.startswith("-") else job
    target = find_target(to) if to else None
    if words and not target:
        raise click.UsageError(f"{words[0]}: neither an option of this command nor, without --to, of a target")
    options = settled_options(target, words) if target else {}
    began = time.monotonic()
    question = LaunchQuestion(reference=job, plan=plan, folder=folder, target=target, options=options)
    found = launch_check(question)
    told = {"job": job, "to": to or "", **found.to_dict()}
    answer(as_json, {**told, "seconds": time.monotonic() - began}, lambda _: host_table(told))
    ctx.exit(_NO if found.would_fail else 0)
