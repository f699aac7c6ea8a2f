"""``phalanx forecast``: one plan's memory and time, before anything is rented."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from phalanx.cli.options import PlanText, html_option, subject, subject_options, write
from phalanx.cli.output import answer, json_option
from phalanx.config import Plan

_DOES_NOT_FIT = 1


@click.command("forecast", short_help="One plan's memory, time and cost, before renting anything.")
@subject_options
@click.option("--plan", type=PlanText(), help='The plan, such as "fsdp=8 recompute=full" [dp over all devices].')
@click.option("--on", required=True, metavar="CLUSTER", help="Devices: 8xH100, 4x8xA100@200Gb/s, or a TOML file.")
@html_option
@json_option
@click.pass_context
def command(ctx: click.Context, on: str, plan: Plan | None, html: Path | None, as_json: bool, **given: Any) -> None:
    """Forecast JOB under a plan on CLUSTER: memory of a rank by part, time of a step by part, energy and cost.

    CONFIG is the config.json of a Hugging Face model, or its folder: no code is needed, but --batch. The devices need
    not be here.

    Exit code 0: it fits. 1: it does not; what is missing and the nearest changes that would fit are shown.

    \b
    Examples:
      phalanx forecast examples/gpt.py --plan "fsdp=8 recompute=full" --on 8xA100-80GB
      phalanx forecast examples/resnet50.py --plan dp=8 --on 8xH100 --price 2.50
    """
    from phalanx.hardware import cluster
    from phalanx.planner import prices
    from phalanx.planner.advise import forecast_plan
    from phalanx.report.planner_tables import forecast_view

    there, priced = cluster(on), prices(given.pop("price"))
    asked = subject(given.pop("what"), **given)
    found = forecast_plan(asked.question(there, plan, prices=priced), plan)
    answer(as_json, {"job": asked.name, **found.to_dict()}, lambda _: forecast_view(asked.name, found))
    if html:
        from phalanx.report.html import forecast_page

        write(html, forecast_page(asked.name, found))
    ctx.exit(0 if found.forecast.fits else _DOES_NOT_FIT)
