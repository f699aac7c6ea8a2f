"""``phalanx stop``: have a run save and stop, wherever it goes on."""

from __future__ import annotations

import time
from pathlib import Path

import click

from phalanx.cli.output import json_option, print_json
from phalanx.cli.status import run_argument
from phalanx.errors import RunError

_SOON = 0.2  # seconds between looks whether it has


@click.command("stop", short_help="Have a run save and stop, wherever it goes on.")
@run_argument
@click.option("--wait", type=click.FloatRange(min=0), default=60.0, show_default=True, help="Seconds to wait for that.")
@json_option
def command(folder: Path, wait: float, as_json: bool) -> None:
    """Have the run in RUN save after the step that is under way, and stop; it is not queued again.

    phalanx train or launch with --resume goes on with it. A run that has ended, or never began, is left as it is.

    \b
    Examples:
      phalanx stop runs/digits-1
    """
    from phalanx.report.run_standing import run_standing, stop_run

    asked = stop_run(folder)
    until = time.monotonic() + wait
    found = run_standing(folder)
    while asked and found.goes_on and time.monotonic() < until:
        time.sleep(_SOON)
        found = run_standing(folder)
    if asked and found.goes_on and wait:
        raise RunError(
            f"{folder} was asked to stop, and goes on after {wait:g} s: {found.state}\n    try: phalanx status {folder}"
        )
    if as_json:
        print_json({**found.to_dict(), "asked": asked})
    else:
        click.echo(f"{folder}: {found.state}" + ("" if asked else "; it did not go on"))
