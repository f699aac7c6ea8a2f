"""Compares forecasts with a table of published runs: ``python tools/validate.py measured.csv``."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Group

from phalanx.cli.output import Answer, json_option, show_error
from phalanx.errors import PhalanxError
from published import accuracy, forecast_rows, read
from published.left_out import left_out as fit_without
from published.left_out import own_preset
from published.page import accuracy_view, left_out_page, left_out_summary, write_page, write_spread


@click.command("validate.py", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("rows", metavar="ROWS", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--page", type=click.Path(path_type=Path, dir_okay=False), help="Write the tables into this file.")
@click.option("--left-out", is_flag=True, help="Forecast each framework, and family of devices, that no constant saw.")
@click.option("--spread", type=click.Path(path_type=Path, exists=True), help="Write what intervals rest on into this.")
@json_option
def command(rows: Path, page: Path | None, left_out: bool, spread: Path | None) -> Answer:
    """Forecast every published run in ROWS, a CSV file, and compare with what was measured, by source.

    Each row becomes a model of standard modules, a plan and a cluster, and takes the path of a user's own model. The
    half of the rows on which constants were fitted, by a hash of the id, and the other half are reported apart.

    Rows of both halves come from the same sweeps. With --left-out, or --page, which shows it, every constant is fitted
    again without each framework, and without each family of devices, and those are forecast: this takes minutes.

    \b
    Example:
      python tools/validate.py measured.csv
    """
    asked = read(rows)
    outcome = forecast_rows(asked)
    unseen = fit_without(asked) if left_out or page or spread else None
    held, fitted = ([one for one in outcome.found if one.row.calibrated == half] for half in (False, True))
    kinds: dict[str, Any] = {"held_out": asdict(accuracy(held)), "fitted": asdict(accuracy(fitted))}
    if unseen:
        kinds["left_out"] = left_out_summary(unseen)
    refused = [{"id": row, "error": why} for row, why in outcome.refused.items()]
    told = {"rows": [one.to_dict() for one in outcome.found], "refused": refused, "accuracy": kinds}
    for row, why in outcome.refused.items():
        click.echo(f"not forecast: {row}: {why}", err=True)
    if unseen and spread:
        write_spread(spread, unseen)
        click.echo(f"wrote {spread}", err=True)
    if unseen and page:
        write_page(page, outcome.found, unseen, own_preset(asked))
        click.echo(f"wrote {page}", err=True)

    def shown(width: int) -> Group:
        return Group(
            accuracy_view(accuracy(held), accuracy(fitted)), left_out_page(unseen, own_preset(asked)) if unseen else ""
        )

    return Answer(told, shown)


def main() -> int:
    """The command, with errors that were raised on purpose as text and an exit code."""
    try:
        command()
    except PhalanxError as error:
        show_error(error, as_json="--json" in sys.argv)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
