"""``phalanx bench``: how fast a job is under several plans, measured here."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.options import PlanText, job_argument
from phalanx.cli.output import json_option, print_json
from phalanx.errors import Problem, RefusedError, SpecError
from phalanx.spec import Job, Plan, RunSpec

if TYPE_CHECKING:
    from rich.console import Console

    from phalanx.observe.summary import RunSummary

_CPU_NOTE = "A device here is one CPU core; the single process computes on one, too."


class _Counts(click.ParamType):
    """Numbers of devices, such as ``1,2,4``."""

    name = "n,n,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        words = value.replace(",", " ").split()
        if not words or not all(word.isdecimal() and int(word) for word in words):
            problem = Problem(where="-n", given=repr(value), allowed="numbers of devices, 1 or more", fix="-n 1,2,4")
            raise SpecError([problem])
        return tuple(int(word) for word in words)


@click.command("bench", short_help="Measure a job's speed under several plans.")
@job_argument
@click.option("-n", "counts", type=_Counts(), help="Devices to measure replicas on [1, 2, 4, ... up to all].")
@click.option(
    "--plan", "plans", type=PlanText(), multiple=True, help="A plan to measure besides one device; repeat it."
)
@click.option("--steps", type=click.IntRange(min=2), default=20, show_default=True, help="Optimizer steps a plan.")
@json_option
def command(job: str, counts: tuple[int, ...] | None, plans: tuple[Plan, ...], steps: int, as_json: bool) -> None:
    """Run JOB for a few steps under each plan and show time, speed-up, efficiency and memory side by side.

    The global batch is the same under every plan. The first steps of each are not timed. Nothing is kept.

    \b
    Examples:
      phalanx bench examples/gpt.py
      phalanx bench examples/digits.py -n 1,2 --steps 40
      phalanx bench examples/gpt.py --plan dp=2 --plan "fsdp=2 zero=3" --json
    """
    from phalanx.launch.jobfile import load_job

    loaded = replace(load_job(job), steps=steps, epochs=None, evaluate=None, metrics=None, evaluate_every=0)
    chosen = _plans(counts, plans)
    _refuse(loaded, chosen)

    from rich.console import Console

    from phalanx.observe.tables import scaled, scaling_table

    summaries = _measure(loaded, job, chosen, Console(stderr=True))
    rows = [scaled(summary, summaries[0]) for summary in summaries]
    if as_json:
        measured = {"job": loaded.name, "batch": loaded.batch, "steps": steps}
        print_json({**measured, "plans": [asdict(row) for row in rows]})
        return
    stdout = Console()
    stdout.print(f"{loaded.name}: {loaded.batch} samples a step, {steps} steps a plan", highlight=False)
    stdout.print(scaling_table(rows), highlight=False)
    if any(row.device == "cpu" for row in rows):
        stdout.print(f"[dim]{_CPU_NOTE}[/]", highlight=False)


def _plans(counts: Sequence[int] | None, plans: Sequence[Plan]) -> list[Plan]:
    """What to measure, the first being what the others are compared with."""
    from phalanx.hardware import this_machine

    if counts is None:
        devices = this_machine().devices
        counts = [1] if plans else sorted({*(2**power for power in range(devices.bit_length())), devices})
    return list(dict.fromkeys([*(Plan(dp=count) for count in counts), *plans]))


def _refuse(job: Job, plans: Sequence[Plan]) -> None:
    """Raise what is wrong with any of the plans before the first is measured."""
    from phalanx.train.assembly import refuse

    problems: list[Problem] = []
    for plan in plans:
        try:
            refuse(job, plan, plan.world_size)
        except RefusedError as error:
            problems += error.problems
    if problems:
        raise RefusedError(problems)


def _measure(job: Job, reference: str, plans: Sequence[Plan], console: Console) -> list[RunSummary]:
    from phalanx.api import fit
    from phalanx.observe.follow import Follower
    from phalanx.observe.progress import progress
    from phalanx.observe.summary import summarise
    from phalanx.parallel import device_kind

    summaries: list[RunSummary] = []
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as scratch:
        for number, plan in enumerate(plans):
            folder = Path(scratch) / str(number)
            viewer = progress(console, label=str(plan), lines=frozenset({"start", "warning"}))
            with Follower(folder / "events.jsonl", [viewer]) as follower:
                run = RunSpec(
                    job=reference, plan=plan, folder=folder, forecast="none"
                )  # cores are for what is measured
                fit(job, run=run, watch=follower, cores=1 if device_kind(plan) == "cpu" else None)
            summaries.append(summarise(folder))
    return summaries
