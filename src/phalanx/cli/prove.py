"""``phalanx prove``: whether a plan computes what one device computes."""

from __future__ import annotations

from typing import Any

import click

from phalanx.cli.options import PlanText, job_argument
from phalanx.cli.output import answer, json_option
from phalanx.config import Plan


@click.command("prove", short_help="Compare a plan with one device.")
@job_argument
@click.option("--plan", type=PlanText(), required=True, help='The plan to prove, such as "dp=2" or "fsdp=2 zero=2".')
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True, help="Optimizer steps to compare.")
@click.option(
    "--against",
    metavar="FILE:FUNCTION",
    help="A training loop of your own to compare with, in place of the plain PyTorch loop that JOB is turned into.",
)
@click.option(
    "--resume/--no-resume",
    default=None,
    help="Resume the run from its middle and compare that, too. Not given: of small models.",
)
@click.option("--small", is_flag=True, help="Prove a small copy: of layers of one class in a row the first two.")
@json_option
@click.pass_context
def command(ctx: click.Context, job: str, plan: Plan, steps: int, small: bool, as_json: bool, **how: Any) -> None:
    """Train JOB twice, by a plain PyTorch loop on one device and under the plan, and compare what both computed.

    Exit code 0: equal within what rounding explains. 1: not equal; the first tensor that differs and the likely cause
    are named. 2: refused. 3: a run failed.

    \b
    Examples:
      phalanx prove examples/digits.py --plan dp=2
      phalanx prove examples/gpt.py --plan "fsdp=2 zero=3 micro=4" --steps 5
      phalanx prove job.py --plan dp=2 --against train.py:loop
      phalanx prove large.py --plan "fsdp=8" --small
    """
    from rich.markup import escape

    from phalanx.api import prove
    from phalanx.launch.jobfile import load_function, load_job
    from phalanx.report.progress import Waiting
    from phalanx.report.render import PlainConsole
    from phalanx.report.tables import proof_table

    loaded = load_job(job)
    how["against"] = load_function(how["against"]) if how["against"] else None
    stderr = PlainConsole(stderr=True)

    def say(note: str) -> None:
        stderr.print(f"[yellow]note:[/] {escape(note)}", highlight=False)

    if small:
        from phalanx.verify import small_copy

        loaded = small_copy(loaded, plan)
        say("this is a small copy of the model, with values that it draws: what fails may be due to that")
    with Waiting(stderr, f"{loaded.name}: {steps} steps on one device, then under {plan}") as waiting:
        proof = prove(loaded, plan, steps=steps, watch=waiting, say=say, **how)
    answer(as_json, {"job": loaded.name, **proof.to_dict()}, lambda _: proof_table(proof.to_dict()))
    ctx.exit(0 if proof.equal else 1)
