"""``phalanx logs``: what the workers of a launched run have printed."""

from __future__ import annotations

from pathlib import Path

import click

from phalanx.cli.output import json_option, print_json
from phalanx.cli.status import follow, more_of, run_argument, show
from phalanx.errors import SpecError


@click.command("logs", short_help="What the workers of a launched run have printed.")
@run_argument
@click.option("--rank", type=click.IntRange(min=0), help="Of this rank alone.")
@click.option("--follow", "-f", "following", is_flag=True, help="Go on as it grows, until the run ends.")
@json_option
def command(folder: Path, rank: int | None, following: bool, as_json: bool) -> None:
    """Print what workers of the run in RUN have printed, which phalanx launch handed over.

    \b
    Examples:
      phalanx logs runs/digits-1 --rank 3
      phalanx logs runs/digits-1 --follow
    """
    from phalanx.report.run_standing import run_standing

    if following and as_json:
        raise SpecError.of("--follow", "with --json", "one of the two", f"phalanx logs {folder} --follow")
    path = _log(folder, rank)
    if following:

        def look() -> tuple[Path, bool]:
            going = run_standing(folder).goes_on
            # a target that keeps it elsewhere brings the file up to date, after the end once more
            return _log(folder, rank), going

        follow(path, look)
        return
    text, at = more_of(path, 0)
    if not text:
        _say_nothing(folder, rank, quiet=as_json)
    if as_json:
        print_json({"path": str(path), "text": text})
        return
    while text:
        show(text)
        text, at = more_of(path, at)


def _log(folder: Path, rank: int | None) -> Path:
    from phalanx.launch.targets.handed_over import UnmarkedError, log_of
    from phalanx.launch.targets.launch_folder import attached_log

    try:
        return log_of(folder, rank)
    except UnmarkedError as error:
        click.echo(f"{error.problems[0].given}: nobody is asked, and this is what the folder has", err=True)
        return attached_log(folder, rank)


def _say_nothing(folder: Path, rank: int | None, *, quiet: bool) -> None:
    """Refuse what is no run, and a rank that it has not; else say that nothing was printed."""
    from phalanx.report.run_standing import ranks_of, run_standing

    run_standing(folder)
    ranks = ranks_of(folder)
    if rank is not None and ranks is not None and rank >= ranks:
        raise SpecError.of("--rank", f"{rank}", f"0 to {ranks - 1}", f"phalanx logs {folder} --rank {ranks - 1}")
    if not quiet:
        who = "its workers have" if rank is None else f"rank {rank} has"
        click.echo(f"{who} printed nothing\n    phalanx status {folder} says how it stands", err=True)
