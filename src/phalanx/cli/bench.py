"""``phalanx bench``: how fast a job is under several plans, measured here."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.options import PlanText, job_argument
from phalanx.cli.output import answer, json_option
from phalanx.config import Job, Plan, RunSpec
from phalanx.config.run_files import EVENTS
from phalanx.device_kinds import on_host
from phalanx.errors import Problem, RefusedError, SpecError

if TYPE_CHECKING:
    from rich.console import Console

    from phalanx.report.summary import RunSummary


_CPU_NOTE = "A device here is one CPU core; the single process computes on one, too."


class _Counts(click.ParamType):
    """Numbers of devices, such as ``1,2,4``."""

    name = "n,n,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        words = value.replace(",", " ").split()
        if not words or not all(word.isdecimal() and int(word) for word in words):
            raise SpecError.of("-n", repr(value), "numbers of devices, 1 or more", fix="-n 1,2,4")
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

    Exit code 0: all were measured. 2: wrong use; nothing ran. 3: a plan failed.

    \b
    Examples:
      phalanx bench examples/gpt.py
      phalanx bench examples/digits.py -n 1,2 --steps 40
      phalanx bench examples/gpt.py --plan dp=2 --plan "fsdp=2 zero=3" --json
    """
    from phalanx.launch.jobfile import load_job

    loaded = _steps_alone(load_job(job), steps)
    chosen = _plans(counts, plans)
    refuse_plans(loaded, chosen)

    from phalanx.report.render import PlainConsole

    _show_scaling(loaded, _measure(loaded, job, chosen, PlainConsole(stderr=True)), as_json)


def _steps_alone(job: Job, steps: int) -> Job:
    """``job`` with so many steps of its largest batch, which evaluates nothing and calls nothing back."""
    from phalanx.train.phase_jobs import in_even_batches, without_evaluation
    from phalanx.train.torch_scheduler import without_plateau

    job = replace(in_even_batches(without_evaluation(job)), steps=steps, epochs=None, callbacks={})
    if job.phases:
        return replace(job, phases=[replace(one, optimizer=without_plateau(one.optimizer)) for one in job.phases])
    return replace(job, optimizer=without_plateau(job.optimizer))


def _show_scaling(job: Job, summaries: Sequence[RunSummary], as_json: bool) -> None:
    """Print what was measured, each beside the first."""
    from rich.console import Group
    from rich.text import Text

    from phalanx.report.tables import scaled, scaling_table

    rows = [scaled(summary, summaries[0]) for summary in summaries]
    told = {"job": job.name, "batch": job.batch, "steps": job.steps, "plans": [asdict(row) for row in rows]}
    head = Text(f"{job.name}: {job.batch} samples a step, {job.steps} steps a plan")
    note = [Text(_CPU_NOTE, style="dim")] if any(on_host(row.device) for row in rows) else []
    answer(as_json, told, lambda _: Group(head, scaling_table(rows), *note))


def _plans(counts: Sequence[int] | None, plans: Sequence[Plan]) -> list[Plan]:
    """What to measure, the first being what the others are compared with."""
    from phalanx.hardware import this_machine

    if counts is None and plans:
        counts = [1]
    elif counts is None:
        most = this_machine().devices
        counts = sorted({*(2**power for power in range(most.bit_length())), most})
    return list(dict.fromkeys([*(Plan(dp=count) for count in counts), *plans]))


def refuse_plans(job: Job, plans: Sequence[Plan]) -> None:
    """Raise what is wrong with any of the plans before the first is measured."""
    from phalanx.launch.side_process import look_ahead
    from phalanx.train.assembly import refuse

    problems: list[Problem] = []
    for plan in plans:
        try:
            refuse(job, plan, plan.world_size)
            look_ahead(job, plan)
        except RefusedError as error:
            problems += error.problems
    if problems:
        raise RefusedError(problems)


def _measure(job: Job, reference: str, plans: Sequence[Plan], console: Console) -> list[RunSummary]:
    """Train ``job`` under each plan and sum it up: a core a worker on CPUs, and no forecast that would take one."""
    from phalanx.api import fit
    from phalanx.events.following import Follower
    from phalanx.parallel import device_kind
    from phalanx.report.progress import progress
    from phalanx.report.summary import summarise

    summaries: list[RunSummary] = []
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as scratch:
        for number, plan in enumerate(plans):
            run = RunSpec(job=reference, plan=plan, folder=Path(scratch) / str(number), forecast="none")
            viewer = progress(console, label=str(plan), lines=frozenset({"start", "warning"}))
            with Follower(run.folder / EVENTS, [viewer]) as follower:
                fit(job, run=run, watch=follower, cores=1 if on_host(device_kind(plan)) else None)
            summaries.append(summarise(run.folder))
    return summaries
