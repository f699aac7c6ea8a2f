"""``phalanx plan``: the ranked plans, why the first wins, and why the others lose or do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from phalanx.cli.options import PRECISIONS, budget_of, deadline_of, html_option, subject, subject_options, write
from phalanx.cli.output import answer, json_option

_NO = 1


@click.command("plan", short_help="The best plans for a cluster, and why.")
@subject_options
@click.option("--on", required=True, metavar="CLUSTER", help="Devices: 8xH100, 4x8xA100@200Gb/s, or a TOML file.")
@click.option("--precision", type=click.Choice(PRECISIONS), help="Of the computation [what the devices do best].")
@click.option("--best", type=click.Choice(["time", "cost", "devices"]), default="time", help="What to rank by [time].")
@click.option("--deadline", metavar="TIME", help="Most the training may take: 90m, 24h, 3d.")
@click.option("--budget", type=float, help="Most it may cost: money with --price, else device-hours.")
@click.option("--because", metavar="PLAN", help='Argue this plan; what it does not say is chosen: "fsdp=8".')
@html_option
@json_option
@click.pass_context
def command(ctx: click.Context, on: str, precision: Any, html: Path | None, as_json: bool, **given: Any) -> None:
    """Find the best plans for JOB on CLUSTER: all that can be run are enumerated, those that fit are priced.

    CONFIG is the config.json of a Hugging Face model, or its folder: no code is needed, but --batch. The devices need
    not be here. --best cost ranks by device time for each sample, on as many of the devices as that takes; --best
    devices finds the smallest cluster within --deadline and --budget.

    Exit code 0: there is a plan. 1: nothing fits, or nothing within the bounds.

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
    from phalanx.report.planner_tables import plan_view

    deadline, budget = deadline_of(given.pop("deadline")), budget_of(given.pop("budget"))
    goal = Goal(by=given.pop("best"), deadline=deadline, budget=budget)
    there, priced, because = cluster(on), prices(given.pop("price")), given.pop("because")
    asked = subject(given.pop("what"), **given)
    advice = advise(asked.question(there, precision=precision, prices=priced), goal, because)
    answer(as_json, {"job": asked.name, **advice.to_dict()}, lambda _: plan_view(asked.name, advice))
    if html:
        from phalanx.report.html import plan_page

        write(html, plan_page(asked.name, advice))
    ctx.exit(0 if advice.ranking.met else _NO)
