"""``phalanx compare``: runs beside each other, and where their losses part."""

from __future__ import annotations

from pathlib import Path

import click

from phalanx.cli.output import answer, json_option


@click.command("compare", short_help="Runs beside each other: losses, time, what differs.")
@click.argument("runs", metavar="RUN RUN", nargs=2, type=click.Path(path_type=Path, file_okay=False))
@json_option
def command(runs: tuple[Path, ...], as_json: bool) -> None:
    """Show the plan, losses, time and pace of the runs in these folders, and which of their settings differ.

    The first step in which losses differ by more than rounding, a part in 10,000, tells where runs part.

    \b
    Examples:
      phalanx compare runs/digits-1 runs/digits-2
    """
    from phalanx.report.comparison import runs_beside, runs_table

    told = runs_beside(runs)
    answer(as_json, told, lambda _: runs_table(told))
