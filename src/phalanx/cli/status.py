"""``phalanx status``, ``logs`` and ``stop``: a run, wherever it goes on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click

from phalanx.cli.output import answer, json_option
from phalanx.files.plain_files import MOST, open_plain
from phalanx.units import visible

_SOON = 0.3  # seconds between looks for more of a log

run_argument = click.argument("folder", metavar="RUN", type=click.Path(path_type=Path, file_okay=False, exists=True))


@click.command("status", short_help="How a run stands, wherever it goes on.")
@run_argument
@json_option
def command(folder: Path, as_json: bool) -> None:
    """How the run in the folder RUN stands: what its target says, the last step, the newest checkpoint.

    Exit code 0, whatever it is; 2 where RUN is no run.

    \b
    Examples:
      phalanx status runs/digits-1
    """
    from phalanx.report.run_standing import run_standing, standing_table

    found = run_standing(folder)
    answer(as_json, found.to_dict(), lambda _: standing_table(found))


def more_of(path: Path, since: int) -> tuple[str, int]:
    """Return what stands in a file from ``since`` on, and where that ends; nothing as long as it is not there."""
    try:
        with os.fdopen(open_plain(path, os.O_RDONLY, below=2), "rb") as file:
            file.seek(since)
            data = file.read(MOST)
    except FileNotFoundError:
        return "", since
    return data.decode(errors="replace"), since + len(data)


def show(text: str) -> None:
    """Print what a run has printed; on a terminal nothing of it steers that."""
    click.echo(visible(text.replace("\r", "\n")) if sys.stdout.isatty() else text, nl=False)


def follow(path: Path, look: Callable[[], tuple[Path, bool]]) -> None:
    """Print a file as it grows.

    ``look()`` is asked when nothing has come for a while: which file it is, where another has come in the place of one
    that was not there yet, and whether there is more to come.
    """
    at, quiet = 0, time.monotonic()
    while True:
        text, at = more_of(path, at)
        if text:
            show(text)
            quiet = time.monotonic()
        elif time.monotonic() - quiet > 10 * _SOON:
            path, goes_on = look()
            if not goes_on:
                show(more_of(path, at)[0])
                return
            quiet = time.monotonic()
        time.sleep(_SOON)
