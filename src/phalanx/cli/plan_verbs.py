"""Verbs that plan ahead: ``plan``, ``forecast``, ``scale``, ``show`` and ``devices``."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from phalanx.cli.options import FILE, Command, duration, plan_option, set_option
from phalanx.cli.output import NO, Answer, json_option, write_page
from phalanx.config import Plan
from phalanx.config.plan import Precision
from phalanx.config.run_files import EVENTS
from phalanx.errors import SpecError

if TYPE_CHECKING:
    from rich.table import Table

    from phalanx.hardware.catalog import CatalogEntry
    from phalanx.preflight.subject import Subject

_WIDE = 92
_batch_option = click.option("--batch", type=click.IntRange(min=0), default=0, help="Global batch [the job's].")
_seq_option = click.option("--seq", type=click.IntRange(min=0), default=0, help="Tokens in a sample [the data's].")
_profile_option = click.option(
    "--profile",
    type=click.Choice(["trace", "measure"]),
    default="trace",
    help="Trace the model, or measure a step if its shapes depend on values [trace].",
)


def _work_options(on: str, *, bounded: bool = False) -> Callable[[Command], Command]:
    """Return the options of verbs that plan for a job or configuration on devices, ``bounded`` in time and cost."""
    options = [
        click.argument("what", metavar="JOB|CONFIG"),
        *(set_option("what"), _batch_option, _seq_option),
        click.option("--steps", type=click.IntRange(min=0), default=0, help="Optimizer steps of the whole training."),
        _profile_option,
        click.option("--price", metavar="NUMBER|FILE", help="Of a device for an hour, or a TOML file of prices."),
        click.option("--on", required=True, metavar="DEVICES", help=on),
        click.option("--html", type=FILE, help="Write the answer as one page with charts into this file."),
    ]
    choices, above = click.Choice(get_args(Precision)), click.FloatRange(0, min_open=True)
    bounds = [
        click.option("--precision", type=choices, help="Of the computation [the devices' best]."),
        click.option("--deadline", metavar="TIME", type=duration, help="Most time for the training: 90m, 24h, 3d."),
        click.option("--budget", type=above, help="Most cost: money with --price, else device-hours."),
    ]

    def decorate(function: Command) -> Command:
        for option in reversed([*options, *(bounds if bounded else ())]):
            function = option(function)
        return function

    return decorate


def _subject(what: str, *, batch: int, seq: int, steps: int = 0, profile: str) -> Subject:
    """Return the work of a job, or of the ``config.json`` of a model."""
    from phalanx.launch.jobfile import load_job
    from phalanx.planner.advise import config_work, is_config
    from phalanx.preflight.subject import Subject

    if not is_config(what):
        return Subject.of(load_job(what), batch=batch, length=seq, steps=steps, values=profile == "measure")
    if profile != "trace":
        allowed = "trace: a configuration has no data to measure with"
        raise SpecError.of("--profile", profile, allowed, "--profile trace")
    path, work = Path(what), config_work(what, batch=batch, length=seq)
    name = path.parent.name if path.suffix == ".json" and path.parent.name else path.stem
    return Subject(name=name, steps=steps, work=lambda: work)


@click.command("forecast", short_help="One plan's memory, time and cost, before renting anything.")
@_work_options("Devices: 8xH100, 4x8xA100@200Gb/s, or a TOML file.")
@plan_option('The plan, such as "fsdp=8 recompute=full" [dp over all devices].')
@json_option
def forecast_command(on: str, plan: Plan | None, price: str | None, html: Path | None, **given: Any) -> Answer:
    """Forecast JOB under a plan on devices: memory of a rank, time of a step by part, energy and cost.

    CONFIG is the config.json of a Hugging Face model, or its folder; it needs --batch and no code. The devices need
    not be here.

    Exit code 0: it fits. 1: it does not; the missing memory and the nearest changes that would fit are shown.

    \b
    Examples:
      phalanx forecast examples/gpt.py --plan "fsdp=8 recompute=full" --on 8xA100-80GB
      phalanx forecast examples/resnet50.py --plan dp=8 --on 8xH100 --price 2.50
    """
    from phalanx.hardware import cluster
    from phalanx.planner import prices
    from phalanx.planner.advise import forecast_plan
    from phalanx.report.html import forecast_page
    from phalanx.report.planner_tables import forecast_view

    there, priced, asked = cluster(on), prices(price), _subject(**given)
    found = forecast_plan(asked.question(there, plan, prices=priced), plan)
    if html:
        write_page(html, forecast_page(asked.name, found))
    told = {"job": asked.name, **found.to_dict()}
    return Answer(told, lambda _: forecast_view(asked.name, found), 0 if found.forecast.fits else NO)


@click.command("plan", short_help="The best plans for a cluster, and why.")
@_work_options("Devices: 8xH100, 4x8xA100@200Gb/s, or a TOML file.", bounded=True)
@click.option("--best", type=click.Choice(["time", "cost", "devices"]), default="time", help="What to rank by [time].")
@click.option("--because", metavar="PLAN", help='Argue this plan; keys that it leaves out are chosen: "fsdp=8".')
@json_option
def plan_command(on: str, precision: Any, price: str | None, html: Path | None, **given: Any) -> Answer:
    """Find the best plans for JOB on devices: all that can be run are listed, those that fit are priced.

    CONFIG is the config.json of a Hugging Face model, or its folder; it needs --batch and no code. The devices need
    not be here. --best cost ranks by device time for each sample, on as few devices as that takes; --best devices finds
    the smallest cluster within --deadline and --budget.

    Exit code 0: there is a plan. 1: no plan fits, or none within the bounds.

    \b
    Examples:
      phalanx plan examples/gpt.py --on 8xH100
      phalanx plan llama/config.json --on 64xH100 --batch 1024 --seq 8192
      phalanx plan examples/resnet50.py --on 8xA100 --because "fsdp=8"
    """
    from phalanx.hardware import cluster
    from phalanx.planner import prices
    from phalanx.planner.advise import advise
    from phalanx.planner.rank import Goal
    from phalanx.report.html import plan_page
    from phalanx.report.planner_tables import plan_view

    bounds: dict[str, Any] = {name: given.pop(name) or 0.0 for name in ("deadline", "budget")}
    goal, because = Goal(by=given.pop("best"), **bounds), given.pop("because")
    there, priced, asked = cluster(on), prices(price), _subject(**given)
    advice = advise(asked.question(there, precision=precision, prices=priced), goal, because)
    if html:
        write_page(html, plan_page(asked.name, advice))
    told = {"job": asked.name, **advice.to_dict()}
    return Answer(told, lambda _: plan_view(asked.name, advice), 0 if advice.ranking.met else NO)


@click.command("scale", short_help="Time, cost and efficiency by devices, and where to stop.")
@_work_options("The kind of device, or a cluster: H100, 8xH100@200Gb/s.", bounded=True)
@click.option("--up-to", type=click.IntRange(min=1), default=1024, show_default=True, help="Most devices.")
@click.option("--worth", type=click.FloatRange(0, 1, min_open=True), default=0.5, help="Least share of the gain [0.5].")
@json_option
def scale_command(on: str, precision: Any, price: str | None, html: Path | None, **given: Any) -> Answer:
    """Find the best plan of JOB on 1, 2, 4, ... devices, with the same global batch on all.

    Shows time, speed-up, efficiency, energy and cost, and the number of devices to stop at: twice as many gain less
    than the share --worth of the ideal gain.

    Exit code 0: there is a number to stop at. 1: no plan fits, or none within deadline and budget.

    \b
    Examples:
      phalanx scale examples/gpt.py --on A100 --up-to 64
      phalanx scale examples/resnet50.py --on H100 --up-to 1024 --budget 500
    """
    from phalanx.hardware import cluster
    from phalanx.planner import prices
    from phalanx.planner.rank import Goal
    from phalanx.planner.scale import scale
    from phalanx.report.html import scale_page
    from phalanx.report.planner_tables import scale_view

    most, share = given.pop("up_to"), given.pop("worth")
    bounds: dict[str, Any] = {name: given.pop(name) or 0.0 for name in ("deadline", "budget")}
    there, priced, asked = cluster(on), prices(price), _subject(**given)
    question = asked.question(there, precision=precision, prices=priced)
    Goal(**bounds).check(question)
    curve = scale(question, most, share=share, **bounds)
    if html:
        write_page(html, scale_page(asked.name, curve))
    told = {"job": asked.name, "device": question.cluster.groups[0].device.name, **curve.to_dict()}
    return Answer(told, lambda _: scale_view(asked.name, curve), 0 if curve.stop else NO)


@click.command("show", short_help="Draw a plan: which rank holds what, and the schedule.")
@click.argument("what", metavar="JOB|RUN")
@set_option("what")
@plan_option('The plan to draw for JOB, such as "pp=2 tp=2 micro=8".')
@click.option("-n", "devices", type=int, help="Devices; without --plan the same as --plan dp=N.")
@click.option("--job", "named", metavar="JOB", help="The job of RUN, whose file is then run, to look at it anew.")
@click.option("--svg", type=FILE, help="Write the picture into this file.")
@json_option
def show_command(what: str, plan: Plan | None, devices: int | None, named: str | None, svg: Path | None) -> Answer:
    """Draw how a plan lays JOB over devices, before any process starts. The devices need not be here.

    Shows the mesh, the part of each tensor on each rank, the stages of a pipeline with their share of the work, and its
    schedule. For a run folder RUN: its plan, the memory of each rank by part, and forecast
    and measured timeline side by side. No file that the folder holds or names is run.

    \b
    Examples:
      phalanx show examples/gpt.py --plan "pp=2 tp=2 micro=4"
      phalanx show examples/gpt.py --plan "fsdp=4 zero=2" --svg plan.svg
      phalanx show runs/gpt-1 --job examples/gpt.py
    """
    from phalanx.cli.settings import Given
    from phalanx.launch.jobfile import load_job
    from phalanx.preflight import forecast_here
    from phalanx.report.render import as_svg
    from phalanx.report.show import of_job, of_run
    from phalanx.report.show_output import shown_text

    _refuse_show(what, plan, devices, named)
    if Path(what).is_dir():
        shown = of_run(Path(what), load_job(named) if named else None, forecast_here)
    else:
        job, given = load_job(what), Given(job=what, plan=plan, devices=devices, folder=None, resume=False, values={})
        shown = of_job(job, given.plan_of(None, job.batch)[0])
    if svg:
        title = f"phalanx show {shown.folder or shown.name}"
        write_page(svg, as_svg(title, shown_text(shown, 110), width=110), "--svg")
    return Answer(shown.to_dict(), lambda width: shown_text(shown, width))


def _refuse_show(what: str, plan: Plan | None, devices: int | None, named: str | None) -> None:
    """Raise SpecError if it is neither a job nor a run, or has options of the other."""
    allowed = "a job (path/to/file.py, path/to/file.py:name or package.module:name) or a run folder"
    if not Path(what).is_dir():
        if named:
            given = f"--job {named} with the job {what}"
            raise SpecError.of("--job", given, "--job with a run folder only", f"phalanx show {named}")
        if "/" in what and ".py" not in what:
            fix = "phalanx show examples/gpt.py --plan tp=2"
            raise SpecError.of("JOB|RUN", f"{what}, which does not exist", allowed, fix)
    elif not os.path.lexists(Path(what) / EVENTS):
        fix = f"phalanx show {Path(what).name}:job --plan tp=2"
        raise SpecError.of("JOB|RUN", f"{what}, a folder that holds no run", allowed, fix)
    elif plan or devices:
        option, none = "--plan" if plan else "-n", "no --plan and no -n for a run, which has its own plan"
        given = f"{option} {plan or devices} with the run folder {what}"
        raise SpecError.of(option, given, none, f"phalanx show {what}")


@click.command("devices", short_help="Figures of devices: peak, memory, bandwidth, links.")
@click.argument("name", metavar="[NAME|JOB|CONFIG]", required=False)
@_batch_option
@_seq_option
@_profile_option
@json_option
def devices_command(name: str | None, batch: int, seq: int, profile: str) -> Answer:
    """Show the catalog of devices, or all figures of the device NAME with their sources.

    With JOB, or the config.json of a model: its forecast on one device of each kind, beside the roofline of peak and
    memory bandwidth, and its bound.

    Peaks are of dense matrix products. The ridge is the FLOP per byte of memory traffic above which arithmetic bounds a
    product. The link joins devices of one node, the network nodes: bandwidth of one device in one direction, if its
    node is full. Names may be the driver's or with their memory, such as A100-80GB-SXM.

    \b
    Examples:
      phalanx devices
      phalanx devices H100
      phalanx devices examples/gpt.py
    """
    from phalanx.hardware import entry, names
    from phalanx.hardware.catalog import facts
    from phalanx.planner.advise import is_config
    from phalanx.planner.roofline import rooflines
    from phalanx.report.planner_tables import roofline_view

    if name and (".py" in name or ":" in name or is_config(name)):
        asked = _subject(name, batch=batch, seq=seq, profile=profile)
        lines = rooflines(asked.work(), names())
        told = {"job": asked.name, "devices": [one.to_dict() for one in lines]}
        return Answer(told, lambda _: roofline_view(asked.name, lines))
    if batch or seq or profile != "trace":
        raise click.UsageError("--batch, --seq and --profile: only with JOB or CONFIG")
    if name:
        one = entry(name)
        labels = max(len(label) for label, _ in facts(one))
        return Answer(_row(one), "\n".join(f"{label:{labels}}  {text}" for label, text in facts(one)))
    entries = [entry(each) for each in names()]
    return Answer({"devices": [_row(one) for one in entries]}, lambda width: _overview(entries, width))


def _overview(entries: list[CatalogEntry], width: int) -> Table:
    from phalanx.hardware.catalog import HEADINGS, LEGEND, NARROW, cells
    from phalanx.report.render import table

    headings = HEADINGS if width >= _WIDE else NARROW
    rows = [{name: row[name] for name in headings} for row in map(cells, entries)]
    made = table(rows, numbers=headings[1:], narrow=True)
    made.caption, made.show_edge = LEGEND, False
    return made


def _row(one: CatalogEntry) -> dict[str, Any]:
    told, device = asdict(one), one.device
    told |= told.pop("device") | {"room": device.room, "ridge": {dtype: device.ridge(dtype) for dtype in device.peak}}
    return told | {"per_node": one.per_node, "network": asdict(one.network(one.per_node))}
