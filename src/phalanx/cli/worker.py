"""``phalanx worker``: one worker of a run, for launchers such as torchrun."""

from __future__ import annotations

from pathlib import Path

import click

from phalanx.cli.output import json_option, print_json
from phalanx.errors import SpecError


@click.command("worker", short_help="Be one worker of a run; for torchrun.")
@click.argument("runfile", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--job", default="", help="Where this worker finds the job, if not where RUNFILE says: a copy of it.")
@json_option
@click.pass_context
def command(ctx: click.Context, runfile: Path, job: str, as_json: bool) -> None:
    """Be one worker of the run that RUNFILE describes.

    torchrun starts it once for each device, and says to each where it stands; alone, it is the only worker. The plan
    in the file must be for as many workers as there are.

    \b
    Examples:
      phalanx worker runs/digits-1/run.toml
      torchrun --nproc-per-node 2 --no-python phalanx worker run.toml
    """
    from phalanx.launch.worker import main

    code = main(runfile, job)
    if as_json and _speaks():
        print_json({"runfile": str(runfile), "exit_code": code})
    ctx.exit(code)


def _speaks() -> bool:
    """Return True if this is the first of all workers, or nobody knows which is."""
    from phalanx.launch.torchrun import place_of_this_process

    try:
        place = place_of_this_process()
    except SpecError:  # main has told of it
        return True
    return place is None or place.rank == 0
