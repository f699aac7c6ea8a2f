"""``phalanx export``: the model that a run has trained, for others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from phalanx.cli.checkpoint import export_command
from phalanx.cli.output import json_option
from phalanx.errors import SpecError


class _Which(click.ParamType):
    name = "STEP|best"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "best" or (str(value).isascii() and str(value).isdigit()):
            return value if value == "best" else int(value)
        return self.fail(f"{value!r} is neither a step nor best", param, ctx)


@click.command("export", short_help="Write the trained model for others.")
@click.argument("place", metavar="RUN", type=click.Path(path_type=Path, file_okay=False))
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--from", "step", type=_Which(), help="The checkpoint of this step, or of the best evaluation [the newest]."
)
@click.option("--dtype", type=click.Choice(("float32", "float16", "bfloat16")), help="Of floating point [as saved].")
@json_option
@click.pass_context
def command(
    ctx: click.Context, place: Path, target: Path, step: int | str | None, dtype: str | None, as_json: bool
) -> None:
    """Write the model that RUN has trained to OUT, whatever the plan it was trained under.

    OUT is a new folder that from_pretrained reads, or a new file *.safetensors. One tensor is in memory at a time.

    \b
    Examples:
      phalanx export runs/digits-1 digits.safetensors
      phalanx export runs/llama-1 llama/ --from best --dtype bfloat16
    """
    if step == "best":
        step = _best(place)
    ctx.invoke(export_command, place=place, step=step, target=target, dtype=dtype, as_json=as_json)


def _best(place: Path) -> int:
    from phalanx.checkpoint import best_step

    step = best_step(place)
    if step is None:
        allowed = "the step of a checkpoint: the run does not compare evaluations, or has had none"
        fix = 'px.Job(..., evaluate=..., best=px.Best("loss")), or no --from: the newest'
        raise SpecError.of("--from", "best", allowed, fix)
    return step
