"""``phalanx demo``: what Phalanx does, on real data, on what this machine has."""

from __future__ import annotations

from pathlib import Path

import click

from phalanx.cli.output import answer, json_option

_NOT_EQUAL = 1


@click.command("demo", short_help="Train, prove and compare two small models here.")
@click.option("--devices", type=click.IntRange(min=2), help="Devices to split over [all GPUs, or up to 4 CPU cores].")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="Where runs go [runs/demo-N].")
@click.option("--steps", type=click.IntRange(min=4), help="Optimizer steps of each run, to make it shorter.")
@json_option
@click.pass_context
def command(ctx: click.Context, devices: int | None, folder: Path | None, steps: int | None, as_json: bool) -> None:
    """Train a convolutional net on handwritten digits and a small GPT on English text, on one device and on several.

    Then prove that both computed the same, and show what the split gave. Nothing is downloaded.

    \b
    Examples:
      phalanx demo
      phalanx demo --devices 2 --json
    """
    from phalanx.demo.tour import Tour, tour_table
    from phalanx.launch.runfile import default_folder
    from phalanx.report.render import PlainConsole

    tour = Tour(
        folder=folder or default_folder("demo"), devices=devices, steps=steps, console=PlainConsole(stderr=True)
    )
    result = tour.walk()
    answer(as_json, result.to_dict(), lambda _: tour_table(result))
    ctx.exit(0 if result.equal else _NOT_EQUAL)
