"""What ``phalanx train`` and ``phalanx launch`` ask of a run: the plan, the folder, and the fields of ``RunSpec``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click

from phalanx.cli.options import PlanText
from phalanx.config.run import Answer

_ANSWERS = click.Choice(get_args(Answer))


class RunCommand(click.Command):
    """Of a run: ``--resume`` stands by itself, or has the word ``auto`` after it; what else follows is not its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        following = [*args, ""][1:]
        alone = [one == "--resume" and after != "auto" for one, after in zip(args, following, strict=True)]
        return super().parse_args(
            ctx, ["--resume=yes" if by_itself else one for one, by_itself in zip(args, alone, strict=True)]
        )


class _Every(click.ParamType):
    """Steps as a number, or a time as text, which ``RunSpec`` looks at."""

    name = "steps|time"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> str | int:
        return int(value) if isinstance(value, str) and value.isdecimal() else value


class _Devices(click.ParamType):
    """How many as a number, or from how many to how many as text, ``1:4``, which ``Given`` looks at."""

    name = "n|least:most"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> str | int:
        return value if isinstance(value, str) and ":" in value else click.INT(value, param, ctx)


_OPTIONS = (
    click.option(
        "--plan", type=PlanText(), help='How to split the work: "dp=2", "fsdp=2 zero=3 micro=8", or a plan.toml.'
    ),
    click.option(
        "-n", "devices", type=_Devices(), help="Devices, or 1:4: 1 to 4; without --plan the same as --plan dp=N."
    ),
    click.option("--run", "folder", type=click.Path(path_type=Path, file_okay=False), help="Run folder [runs/JOB-N]."),
    click.option(
        "--resume",
        type=click.Choice(["yes", "auto"]),
        metavar="[auto]",
        help="Go on from the newest checkpoint in the run folder; auto: if there is one, else begin.",
    ),
    click.option("--from", "from_step", metavar="STEP", type=int, help="Go on from the checkpoint of this step."),
    click.option("--batch", type=int, help="Global batch, in place of the job's."),
    click.option("--lr-scale", type=float, help="Factor on every learning rate."),
    click.option("--steps", type=int, help="Optimizer steps, in place of the job's length."),
    click.option("--epochs", type=int, help="Passes over the data, in place of the job's length."),
    click.option("--checkpoint-every", type=_Every(), help="Steps or time (90s, 15m, 2h) between checkpoints [15m]."),
    click.option(
        "--checkpoint", type=click.Choice(["all", "trainable"]), help="Parameters that checkpoints hold [all]."
    ),
    click.option("--keep", type=int, help="Checkpoints to keep [2]."),
    click.option("--keep-every", type=int, help="Keep also those whose step is a multiple of this."),
    click.option("--mirror", metavar="URL", help="Copy checkpoints to s3://bucket/runs/1 or the like."),
    click.option("--grace", type=float, help="Seconds for the last checkpoint when asked to stop; 0: none [30]."),
    click.option("--restarts", type=int, help="How often lost workers are started again [3]."),
    click.option("--grow-after", type=_Every(), help="With -n 1:4: steps or time with fewer devices before more [5m]."),
    click.option("--log-every", type=int, help="Steps between lines in events.jsonl [1]."),
    click.option("--on-nonfinite", type=_ANSWERS, help="Of a loss, gradient or parameter that is not finite [stop]."),
    click.option("--spike", type=float, help="Deviations above the median that make a loss a spike [none is one]."),
    click.option("--on-spike", type=_ANSWERS, help="What to do about a spike [stop]."),
    click.option("--timeout", type=float, help="Seconds that ranks wait for one that does not come [300]."),
    click.option("--drift", type=click.Choice(["stop", "warn", "off"]), help="Where replicas are not the same [stop]."),
    click.option("--drift-every", type=int, help="Steps between looks at a fifth of the parameters [10]."),
    click.option("--anyway", "forecast", flag_value="anyway", help="Train even if the plan is forecast not to fit."),
    click.option("--no-forecast", "forecast", flag_value="none", help="Make no forecast."),
    click.option("--check", type=click.Choice(["first-step", "off"]), help="Against one device [first-step]."),
)


def run_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a run, by their names in ``Given``."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
