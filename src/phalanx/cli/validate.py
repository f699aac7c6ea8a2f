"""``phalanx validate``: forecasts beside published measurements."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from phalanx.cli.output import json_option, print_json


@click.command("validate", short_help="Forecasts beside published measurements: how far off they are.")
@click.argument("rows", metavar="ROWS", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--page", type=click.Path(path_type=Path, dir_okay=False), help="Write the tables into this file.")
@json_option
def command(rows: Path, page: Path | None, as_json: bool) -> None:
    """Forecast every published run in ROWS, a CSV file, and compare with what was measured, by source.

    Each row becomes a model of standard modules, a plan and a cluster, and takes the path of a user's own model. The
    half of the rows on which constants were fitted, by a hash of the id, and the other half are reported apart.

    \b
    Example:
      phalanx validate measured.csv
    """
    from phalanx.verify.published import accuracy, foretell, read

    outcome = foretell(read(rows))
    held, fitted = ([one for one in outcome.found if one.row.calibrated == half] for half in (False, True))
    if as_json:
        kinds = {"held_out": asdict(accuracy(held)), "fitted": asdict(accuracy(fitted))}
        refused = [{"id": row, "error": why} for row, why in outcome.refused.items()]
        print_json({"rows": [one.to_dict() for one in outcome.found], "refused": refused, "accuracy": kinds})
    else:
        from rich.console import Console

        from phalanx.verify.published.tables import accuracy_view

        Console().print(accuracy_view(accuracy(held), accuracy(fitted)), highlight=False)
        for row, why in outcome.refused.items():
            click.echo(f"not forecast: {row}: {why}", err=True)
    if page:
        from phalanx.verify.published.page import write_page

        write_page(page, outcome.found)
        click.echo(f"wrote {page}", err=True)
