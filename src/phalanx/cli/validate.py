"""``phalanx validate``: forecasts beside published measurements."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from phalanx.cli.output import json_option, print_json


@click.command("validate", short_help="Forecasts beside published measurements: how far off they are.")
@click.argument("rows", metavar="ROWS", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--page", type=click.Path(path_type=Path, dir_okay=False), help="Write the tables into this file.")
@click.option("--left-out", is_flag=True, help="Forecast each framework, and family of devices, that no constant saw.")
@click.option("--spread", type=click.Path(path_type=Path, exists=True), help="Write what intervals rest on into this.")
@json_option
def command(rows: Path, page: Path | None, left_out: bool, spread: Path | None, as_json: bool) -> None:
    """Forecast every published run in ROWS, a CSV file, and compare with what was measured, by source.

    Each row becomes a model of standard modules, a plan and a cluster, and takes the path of a user's own model. The
    half of the rows on which constants were fitted, by a hash of the id, and the other half are reported apart.

    Rows of both halves come from the same sweeps. With --left-out, or --page, which shows it, every constant is fitted
    again without each framework, and without each family of devices, and those are forecast: this takes minutes.

    \b
    Example:
      phalanx validate measured.csv
    """
    from phalanx.verify.published import accuracy, foretell, read
    from phalanx.verify.published.left_out import left_out as fit_without
    from phalanx.verify.published.left_out import own_preset
    from phalanx.verify.published.left_out_page import left_out_page, left_out_summary, write_spread

    asked = read(rows)
    outcome = foretell(asked)
    unseen = fit_without(asked) if left_out or page or spread else None
    held, fitted = ([one for one in outcome.found if one.row.calibrated == half] for half in (False, True))
    if as_json:
        kinds: dict[str, Any] = {"held_out": asdict(accuracy(held)), "fitted": asdict(accuracy(fitted))}
        if unseen:
            kinds["left_out"] = left_out_summary(unseen)
        refused = [{"id": row, "error": why} for row, why in outcome.refused.items()]
        print_json({"rows": [one.to_dict() for one in outcome.found], "refused": refused, "accuracy": kinds})
    else:
        from rich.console import Console

        from phalanx.verify.published.tables import accuracy_view

        Console().print(accuracy_view(accuracy(held), accuracy(fitted)), highlight=False)
        if unseen:
            click.echo(left_out_page(unseen, own_preset(asked)))
        for row, why in outcome.refused.items():
            click.echo(f"not forecast: {row}: {why}", err=True)
    if unseen and spread:
        write_spread(spread, unseen)
        click.echo(f"wrote {spread}", err=True)
    if unseen and page:
        from phalanx.verify.published.page import write_page

        write_page(page, outcome.found, unseen, own_preset(asked))
        click.echo(f"wrote {page}", err=True)
