"""``phalanx show``: a plan drawn, before any process starts or beside what a run measured."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from phalanx.cli.options import PlanText, set_option, write
from phalanx.cli.output import answer, json_option
from phalanx.config import Plan
from phalanx.config.run_files import EVENTS
from phalanx.errors import SpecError

if TYPE_CHECKING:
    from phalanx.report.show import Shown


@click.command("show", short_help="Draw a plan: who holds what, and the schedule.")
@click.argument("what", metavar="JOB|RUN")
@set_option("what")
@click.option("--plan", type=PlanText(), help='The plan to draw for JOB, such as "pp=2 tp=2 micro=8".')
@click.option("-n", "devices", type=int, help="Devices; without --plan the same as --plan dp=N.")
@click.option("--job", "named", metavar="JOB", help="The job of RUN, to look at it anew: its file is run.")
@click.option("--svg", type=click.Path(path_type=Path, dir_okay=False), help="Write the picture into this file.")
@json_option
def command(
    what: str, plan: Plan | None, devices: int | None, named: str | None, svg: Path | None, as_json: bool
) -> None:
    """Draw how a plan lays JOB over devices, before any process starts. The devices need not be here.

    Shown are the mesh, which rank holds which part of which tensor, the stages of a pipeline with their share of the
    work, and its schedule as a timeline with the share of time that ranks are idle. For a run folder RUN: its plan,
    the memory of each rank by part, its forecast beside what was measured, and the measured timeline beside the planned
    one. It is drawn from what the run stored: no file that the folder holds or names is run.

    \b
    Examples:
      phalanx show examples/gpt.py --plan "pp=2 tp=2 micro=4"
      phalanx show examples/gpt.py --plan "fsdp=4 zero=2" --svg plan.svg
      phalanx show runs/gpt-1
      phalanx show runs/gpt-1 --job examples/gpt.py
    """
    folder = Path(what)
    # a package is a folder, too, and only run where it is named as a job: package:job
    shown = _of_run(folder, plan, devices, named) if folder.is_dir() else _of_job(what, plan, devices, named)
    from phalanx.report.render import as_svg
    from phalanx.report.show_output import shown_text

    if svg:
        title = f"phalanx show {shown.folder or shown.name}"
        write(svg, as_svg(title, shown_text(shown, 110), width=110), "--svg")
    answer(as_json, shown.to_dict(), lambda width: shown_text(shown, width))


def _of_job(what: str, plan: Plan | None, devices: int | None, named: str | None) -> Shown:
    if named:
        given, allowed = f"--job {named} with the job {what}", "--job with a run folder only"
        raise SpecError.of(where="--job", given=given, allowed=allowed, fix=f"phalanx show {named}")
    from phalanx.cli.settings import Given, plan_of
    from phalanx.launch.jobfile import load_job

    given = Given(job=what, plan=plan, devices=devices, folder=None, resume=False, values={})
    if "/" in what and ".py" not in what:
        raise _neither(what, "which does not exist")
    try:
        job = load_job(what)
    except SpecError as error:
        if error.problems[0].where == "job":  # there is nothing of that name
            error.add_note("A run folder would do, too: phalanx show runs/JOB-1")
        raise

    from phalanx.report.show import of_job

    return of_job(job, plan_of(given, None, job.batch)[0])


def _of_run(folder: Path, plan: Plan | None, devices: int | None, named: str | None) -> Shown:
    if not os.path.lexists(folder / EVENTS):
        raise _neither(str(folder), "a folder that holds no run", f"phalanx show {folder.name}:job --plan tp=2")
    if plan or devices:
        option = "--plan" if plan else "-n"
        told = "no --plan and no -n for a run, which has its own plan"
        given = f"{option} {plan or devices} with the run folder {folder}"
        raise SpecError.of(where=option, given=given, allowed=told, fix=f"phalanx show {folder}")
    from phalanx.launch.jobfile import load_job
    from phalanx.preflight import forecast_here
    from phalanx.report.show import of_run

    return of_run(folder, load_job(named) if named else None, forecast_here)


def _neither(what: str, given: str, fix: str = "phalanx show examples/gpt.py --plan tp=2") -> SpecError:
    allowed = "a job (path/to/file.py, path/to/file.py:name or package.module:name) or a run folder"
    return SpecError.of(where="JOB|RUN", given=f"{what}, {given}", allowed=allowed, fix=fix)
