"""``phalanx chaos``: a run under faults, and whether anything was lost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.options import PlanText, job_argument
from phalanx.cli.output import answer, json_option
from phalanx.config import Plan

if TYPE_CHECKING:
    from phalanx.verify.chaos import Chaos, Fault

_NO = 1
_COUNT = click.IntRange(min=0)


@click.command("chaos", short_help="Run a job under faults, and check that nothing is lost.")
@job_argument
@click.option("--plan", type=PlanText(), required=True, help='The plan to run under, such as "dp=2" or "fsdp=4".')
@click.option("--kills", type=_COUNT, default=0, help="So many SIGKILLs at random moments, a third during a save.")
@click.option("--faults", type=_COUNT, default=0, help="So many random faults of every kind to be had here.")
@click.option("--at", "given", multiple=True, metavar="FAULT", help='A fault in words: "SIGKILL rank 1 step 7".')
@click.option("--seed", type=int, default=0, show_default=True, help="What faults and bytes to damage are drawn from.")
@click.option("--steps", type=int, default=60, show_default=True, help="Optimizer steps of the run.")
@click.option("--checkpoint-every", type=int, default=5, show_default=True, help="Steps between checkpoints.")
@click.option("--batch", type=int, help="Global batch, in place of the job's.")
@click.option(
    "--limit", type=float, default=120.0, show_default=True, help="Seconds without progress that count as a hang."
)
@click.option("--run", "folder", type=click.Path(path_type=Path, file_okay=False), help="Folder [runs/JOB-chaos-N].")
@json_option
@click.pass_context
def command(ctx: click.Context, job: str, plan: Plan, given: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Train JOB twice by ``phalanx train``, undisturbed and under faults, and compare what both came to.

    Each time the run dies it is begun again. A fault is KIND [TARGET] step N, or save N for the middle of the N-th
    save, and [for 2s] or [for ever] where it lasts. Kinds: SIGKILL, SIGTERM, SIGSTOP of rank N, ranks, launcher or
    everything; exception, nan, clock of rank N; cut (of all links); full-disk, slow-disk of rank N or ranks; tear, flip
    of tensors, manifest, state or any file of the newest checkpoint. Without --kills, --faults and --at it is ten
    kills. The same seed draws the same faults.

    Exit code 0: nothing was lost: the run ended, with the undisturbed run's weights, bit for bit where the plan
    promises that, each sample seen as often as there, no damaged checkpoint believed, nothing left over. 1: something
    was lost, or a fault of --at did not strike; it is named. 2: refused. 3: the job fails without any fault.

    \b
    Examples:
      phalanx chaos examples/digits.py --plan dp=2 --kills 50 --seed 1
      phalanx chaos examples/digits.py --plan fsdp=2 --at "SIGKILL rank 0 save 2" --at "flip tensors step 14"
    """
    from phalanx.launch import default_folder
    from phalanx.launch.jobfile import Reference
    from phalanx.verify.chaos import Chaos

    kills, faults, seed, batch = (options[name] for name in ("kills", "faults", "seed", "batch"))
    chaos = Chaos(
        job,
        plan,
        folder=options["folder"] or default_folder(f"{Reference.parse(job).stem}-chaos"),
        steps=options["steps"],
        checkpoint_every=options["checkpoint_every"],
        options=() if batch is None else ("--batch", str(batch)),
        limit=options["limit"],
    )
    chosen = _chosen(chaos, job, given, kills if kills or faults or given else 10, faults, seed)
    click.echo(f"{chaos.folder}: {len(chosen)} faults for {job} under {plan}; undisturbed first", err=True)
    chaos.undisturbed()
    verdict = chaos.run(chosen, say=lambda outcome: click.echo(str(outcome), err=True), seed=seed)

    from phalanx.report.tables import chaos_table

    answer(as_json, verdict.to_dict(), lambda _: chaos_table(verdict.to_dict()))
    ctx.exit(0 if verdict.passed else _NO)


def _chosen(chaos: Chaos, job: str, given: tuple[str, ...], kills: int, faults: int, seed: int) -> list[Fault | str]:
    """What was asked for by ``--at``, ``--kills`` and ``--faults``; says which kinds cannot be had here."""
    from phalanx.verify.chaos import Fault
    from phalanx.verify.chaos.verdict import kinds_here

    chosen: list[Fault | str] = [*(str(Fault.parse(text)) for text in given), *chaos.draw(kills, seed=seed)]
    if faults:
        kinds, missing = kinds_here(job)
        for kind, why in missing.items():
            click.echo(f"left out: {kind}: {why}", err=True)
        chosen += chaos.draw(faults, seed=seed, kinds=kinds)
    return chosen
