"""``phalanx prove``: whether a plan computes what one device computes."""

from __future__ import annotations

import click

from phalanx.cli.options import PlanText, job_argument
from phalanx.cli.output import answer, json_option
from phalanx.config import Plan

_NOT_EQUAL = 1


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
@json_option
@click.pass_context
def command(
    ctx: click.Context, job: str, plan: Plan, steps: int, against: str | None, resume: bool | None, as_json: bool
) -> None:
    """Train JOB twice, by a plain PyTorch loop on one device and under the plan, and compare what both computed.

    Exit code 0: equal within what rounding explains. 1: not equal; the first tensor that differs and the likely cause
    are named. 2: refused. 3: a run failed.

    \b
    Examples:
      phalanx prove examples/digits.py --plan dp=2
      phalanx prove examples/gpt.py --plan "fsdp=2 zero=3 micro=4" --steps 5
      phalanx prove job.py --plan dp=2 --against train.py:loop
    """
    from phalanx.launch.jobfile import load_function, load_job

    loaded = load_job(job)
    own = load_function(against) if against else None

    from rich.markup import escape

    from phalanx.api import prove
    from phalanx.report.progress import Waiting
    from phalanx.report.tables import PlainConsole, proof_table

    stderr = PlainConsole(stderr=True)

    def say(note: str) -> None:
        stderr.print(f"[yellow]note:[/] {escape(note)}", highlight=False)

    with Waiting(stderr, f"{loaded.name}: {steps} steps on one device, then under {plan}") as waiting:
        proof = prove(loaded, plan, steps=steps, against=own, watch=waiting, say=say, resume=resume)
    answer(as_json, {"job": loaded.name, **proof.to_dict()}, lambda _: proof_table(proof.to_dict()))
    ctx.exit(0 if proof.equal else _NOT_EQUAL)
