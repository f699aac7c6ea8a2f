"""``phalanx audit``: did a run see each sample exactly once an epoch?"""

from __future__ import annotations

from pathlib import Path

import click

from phalanx.cli.output import answer, json_option

_NO = 1
_UNCHECKED = (
    "the numbers (phalanx prove compares a plan with one device)",
    "whether replicas were the same (train compares them as it goes, unless --drift off)",
    "whether checkpoints are whole",
)


@click.command("audit", short_help="Check that a run saw each sample once an epoch.")
@click.argument("run", type=click.Path(path_type=Path, file_okay=False))
@json_option
@click.pass_context
def command(ctx: click.Context, run: Path, as_json: bool) -> None:
    """Read the ledger in the run folder RUN, which records the samples of each step.

    It checks which samples were seen, and nothing else: what the run's log says of errors, hangs and drift stands
    beside the answer, and so does what was not checked.

    Exit code 0: each sample was seen exactly once in each epoch, over all parts of the run and however many devices
    each had. 1: not; samples seen twice or never and missing steps are named.

    \b
    Examples:
      phalanx audit runs/digits-1
      phalanx audit runs/digits-1 --json
    """
    from rich.console import Group
    from rich.text import Text

    from phalanx.report.samples_seen import samples_seen, troubles
    from phalanx.report.tables import seen_table

    result, log = samples_seen(run), troubles(run)
    beside = [Text(f"  its log says: {sentence}") for sentence in log]
    unchecked = Text(f"not checked: {'; '.join(_UNCHECKED)}", style="dim")
    rows = {**result.to_dict(), "log": log, "not_checked": list(_UNCHECKED)}
    answer(as_json, rows, lambda _: Group(seen_table(result), *beside, unchecked))
    ctx.exit(0 if result.once else _NO)
