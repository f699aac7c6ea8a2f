"""``phalanx scale``: time, cost and efficiency against the number of devices, and where to stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from phalanx.cli.options import PRECISIONS, budget_of, deadline_of, html_option, subject, subject_options, write
from phalanx.cli.output import answer, json_option
from phalanx.errors import SpecError

_NO = 1


@click.command("scale", short_help="Time, cost and efficiency by devices, and where to stop.")
@subject_options
@click.option("--on", required=True, metavar="DEVICE", help="The kind of device, or a cluster: H100, 8xH100@200Gb/s.")
@click.option("--up-to", type=click.IntRange(min=1), default=1024, show_default=True, help="Most devices.")
@click.option("--precision", type=click.Choice(PRECISIONS), help="Of the computation [what the devices do best].")
@click.option("--worth", type=float, default=0.5, show_default=True, help="Share of the ideal gain to stop below.")
@click.option("--deadline", metavar="TIME", help="Most the training may take: 90m, 24h, 3d.")
@click.option("--budget", type=float, help="Most it may cost: money with --price, else device-hours.")
@html_option
@json_option
@click.pass_context
def command(ctx: click.Context, on: str, html: Path | None, as_json: bool, **given: Any) -> None:
    """Find the best plan of JOB on 1, 2, 4, ... devices; the global batch is the same on all.

    Shown are time, speed-up, efficiency, energy and cost, the number of devices from which on doubling them gains less
    than --worth of what it could, and from which on more are slower.

    Exit code 0: there is a number of devices to stop at. 1: nothing fits, or nothing within deadline and budget.

    \b
    Examples:
      phalanx scale examples/gpt.py --on A100 --up-to 64
      phalanx scale examples/resnet50.py --on H100 --up-to 1024 --budget 500
    """
    most, share = given.pop("up_to"), given.pop("worth")
    if not 0 < share <= 1:
        allowed = "a share above 0, at most 1, of what twice the devices could gain"
        raise SpecError.of(where="--worth", given=f"{share:g}", allowed=allowed, fix="--worth 0.5")
    deadline, budget = deadline_of(given.pop("deadline")), budget_of(given.pop("budget"))
    from phalanx.hardware import cluster
    from phalanx.planner import prices
    from phalanx.planner.rank import Goal
    from phalanx.planner.scale import scale
    from phalanx.report.planner_tables import scale_view

    there, how = cluster(on), {"precision": given.pop("precision"), "prices": prices(given.pop("price"))}
    asked = subject(given.pop("what"), **given)
    question = asked.question(there, **how)
    Goal(deadline=deadline, budget=budget).check(question)
    curve = scale(question, most, share=share, budget=budget, deadline=deadline)
    told = {"job": asked.name, "device": question.cluster.groups[0].device.name, **curve.to_dict()}
    answer(as_json, told, lambda _: scale_view(asked.name, curve))
    if html:
        from phalanx.report.html import scale_page

        write(html, scale_page(asked.name, curve))
    ctx.exit(0 if curve.stop else _NO)
