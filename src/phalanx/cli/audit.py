"""``phalanx audit``: did a run see each sample exactly once an epoch?"""

from __future__ import annotations

from pathlib import Path

import click

from phalanx.cli.output import answer, json_option

_NO = 1


@click.command("audit", short_help="Check that a run saw each sample once an epoch.")
@click.argument("run", type=click.Path(path_type=Path, file_okay=False))
@json_option
@click.pass_context
def command(ctx: click.Context, run: Path, as_json: bool) -> None:
    """Read the ledger in the run folder RUN, in which every rank wrote down the samples of each step.

    Exit code 0: each sample was seen exactly once in each epoch, over all parts of the run and however many devices
    each had. 1: not; samples seen twice or never and missing steps are named.

    \b
    Examples:
      phalanx audit runs/digits-1
      phalanx audit runs/digits-1 --json
    """
    from phalanx.report.summary import samples_seen
    from phalanx.report.tables import seen_table

    result = samples_seen(run)
    answer(as_json, result.to_dict(), lambda _: seen_table(result))
    ctx.exit(0 if result.once else _NO)
