"""Verbs that run a job several times and compare: ``prove``, ``sweep``, ``bench`` and ``demo``."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.options import FOLDER, complete_file, job_argument, named_values, plan_option
from phalanx.cli.output import NO, STOPPED, Answer, json_option
from phalanx.config import Job, Plan, RunSpec
from phalanx.config.run_files import EVENTS
from phalanx.device_kinds import on_host
from phalanx.errors import Problem, RefusedError, SpecError

if TYPE_CHECKING:
    from phalanx.events.following import Follower
    from phalanx.report.summary import RunSummary

_CPU_NOTE = "A device here is one CPU core; the single process computes on one, too."
_SWEEP = "phalanx sweep train.py --set lr=1e-3,3e-4"


@click.command("prove", short_help="Compare a plan with one device.")
@job_argument
@plan_option('The plan to prove, such as "dp=2" or "fsdp=2 zero=2".', required=True)
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True, help="Optimizer steps to compare.")
@click.option("--against", metavar="FILE:FUNCTION", help="A training loop of your own [a plain loop made from JOB].")
@click.option("--resume/--no-resume", default=None, help="Compare also a resume from the middle [for small models].")
@click.option("--small", is_flag=True, help="Prove a small copy: the first two of equal layers in a row.")
@json_option
def prove_command(job: str, plan: Plan, steps: int, small: bool, **how: Any) -> Answer:
    """Train JOB twice, by a plain PyTorch loop on one device and under the plan, and compare the results.

    Exit code 0: equal up to rounding. 1: not equal; the first tensor that differs and the likely cause are named.
    2: refused. 3: a run failed.

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
        say("this is a small copy of the model, with values of its own: a failure may be due to that")
    with Waiting(stderr, f"{loaded.name}: {steps} steps on one device, then under {plan}") as waiting:
        proof = prove(loaded, plan, steps=steps, watch=waiting, say=say, **how)
    told = proof.to_dict()
    return Answer({"job": loaded.name, **told}, lambda _: proof_table(told), 0 if proof.equal else NO)


@click.command("sweep", short_help="Train a job with each combination of some values.")
@click.argument("job", shell_complete=complete_file)
@click.option("--set", "given", metavar="NAME=VALUE,...", multiple=True, help="Values of a name; may be repeated.")
@plan_option("A plan to train under; may be repeated.", multiple=True)
@click.option("--steps", type=click.IntRange(min=1), help="Optimizer steps of each run, in place of the job's length.")
@click.option("--run", "folder", type=FOLDER, help="Folder [runs/JOB-sweep-N].")
@click.option("--quiet", is_flag=True, help="Show no progress.")
@json_option
def sweep_command(job: str, given: tuple[str, ...], plan: tuple[Plan, ...], quiet: bool, **how: Any) -> Answer:
    """Train JOB with each combination of values, which it declares by px.param, and plans; show the best first.

    Each run has a folder in the sweep's folder. Runs are ranked by the job's px.Best, else by the last evaluation's
    loss, else by the last step's. A combination that cannot be trained is a row with its reason. Ctrl-C ends the sweep
    with the table so far.

    Exit code 0: all were trained. 1: a combination was refused. 2: wrong use; nothing ran. 3: a run failed.

    \b
    Examples:
      phalanx sweep train.py --set lr=1e-3,3e-4 --set width=64,128
      phalanx sweep train.py --set lr=1e-3,3e-4 --plan dp=2 --steps 100
    """
    from phalanx.report.sweep_rows import sweep_table
    from phalanx.sweep import (
        FAILED,
        AxisWords,
        JobSource,
        SweepRuns,
        axis_problems,
        combined,
        refuse_values,
        refuse_within_workers,
        sweep_folder,
    )

    refuse_within_workers(f"{_SWEEP} --plan dp=2")
    words = AxisWords(
        values="--set", plans="--plan", some_values="--set lr=1e-3,3e-4", some_plans="--plan dp=2", example=_SWEEP
    )
    texts = named_values(job, given, ",VALUE")
    axes = {name: [value.strip() for value in text.split(",")] for name, text in texts.items()}
    if problems := axis_problems(axes, plan, words, {name: f"{name}={text}" for name, text in texts.items()}):
        raise SpecError(problems)
    wanted = combined(JobSource(reference=job), axes, plan)
    refuse_values(wanted)
    folder = sweep_folder(wanted[0].source.stem, how["folder"], "--run")
    runs = SweepRuns(folder=folder, steps=how["steps"], count=len(wanted), look=partial(_follower, quiet=quiet))
    try:
        runs.train(wanted)
        code = runs.exit_code
    except KeyboardInterrupt:
        code = STOPPED
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else FAILED
    told = runs.result(job).to_dict()
    return Answer(told, lambda _: sweep_table(told), code)


def _follower(log: Path, label: str, *, quiet: bool = False) -> Follower:
    """Return a viewer of the run that writes ``log``: its progress, or only its damaged checkpoints; on stderr."""
    from phalanx.events.following import Follower
    from phalanx.report.progress import Damages, progress
    from phalanx.report.render import PlainConsole

    console, lines = PlainConsole(stderr=True), frozenset({"start", "warning", "ended_early", "restart"})
    return Follower(log, [Damages(console) if quiet else progress(console, label=label, lines=lines)])


def _counts(text: str) -> tuple[int, ...]:
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise SpecError.of("-n", repr(text), "numbers of devices, 1 or more", fix="-n 1,2,4")
    return tuple(int(word) for word in words)


@click.command("bench", short_help="Measure a job's speed under several plans.")
@job_argument
@click.option("-n", "counts", metavar="N,N,...", type=_counts, help="Numbers of replicas [1, 2, 4, ... up to all].")
@plan_option("A plan to measure besides one device; may be repeated.", multiple=True)
@click.option("--steps", type=click.IntRange(min=2), default=20, show_default=True, help="Optimizer steps a plan.")
@json_option
def bench_command(job: str, counts: tuple[int, ...] | None, plan: tuple[Plan, ...], steps: int) -> Answer:
    """Run JOB for a few steps under each plan and show time, speed-up, efficiency and memory side by side.

    The global batch is the same under every plan. The first steps of each are not timed. Nothing is kept.

    Exit code 0: all were measured. 2: wrong use; nothing ran. 3: a plan failed.

    \b
    Examples:
      phalanx bench examples/gpt.py
      phalanx bench examples/digits.py -n 1,2 --steps 40
      phalanx bench examples/gpt.py --plan dp=2 --plan "fsdp=2 zero=3" --json
    """
    from phalanx.hardware import this_machine
    from phalanx.launch.jobfile import load_job
    from phalanx.report.tables import scaled

    loaded = _steps_alone(load_job(job), steps)
    if counts is None:
        most = this_machine().devices
        counts = (1,) if plan else (*(2**power for power in range(most.bit_length())), most)
    plans = list(dict.fromkeys([*(Plan(dp=count) for count in counts), *plan]))
    refuse_plans(loaded, plans)
    summaries = _measure(loaded, job, plans)
    rows = [scaled(summary, summaries[0]) for summary in summaries]
    told = {"job": loaded.name, "batch": loaded.batch, "steps": loaded.steps, "plans": [asdict(row) for row in rows]}

    def shown(width: int) -> Any:
        from rich.console import Group
        from rich.text import Text

        from phalanx.report.tables import scaling_table

        head = Text(f"{loaded.name}: {loaded.batch} samples a step, {steps} steps a plan")
        note = [Text(_CPU_NOTE, style="dim")] if any(on_host(row.device) for row in rows) else []
        return Group(head, scaling_table(rows), *note)

    return Answer(told, shown)


def _steps_alone(job: Job, steps: int) -> Job:
    """Return ``job`` with so many steps of its largest batch, without evaluations and callbacks."""
    from phalanx.train.phase_jobs import in_even_batches, without_evaluation
    from phalanx.train.torch_scheduler import without_plateau

    job = replace(in_even_batches(without_evaluation(job)), steps=steps, epochs=None, callbacks={})
    if job.phases:
        return replace(job, phases=[replace(one, optimizer=without_plateau(one.optimizer)) for one in job.phases])
    return replace(job, optimizer=without_plateau(job.optimizer))


def refuse_plans(job: Job, plans: Sequence[Plan]) -> None:
    """Raise RefusedError with everything that is wrong with the plans, before the first is measured."""
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


def _measure(job: Job, reference: str, plans: Sequence[Plan]) -> list[RunSummary]:
    """Train ``job`` under each plan: a core a worker on CPUs, and no forecast, which would need a core."""
    from phalanx.api import fit
    from phalanx.parallel import device_kind
    from phalanx.report.summary import summarise

    summaries: list[RunSummary] = []
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as scratch:
        for number, plan in enumerate(plans):
            run = RunSpec(job=reference, plan=plan, folder=Path(scratch) / str(number), forecast="none")
            with _follower(run.folder / EVENTS, str(plan)) as follower:
                fit(job, run=run, watch=follower, cores=1 if on_host(device_kind(plan)) else None)
            summaries.append(summarise(run.folder))
    return summaries


@click.command("demo", short_help="Train, prove and compare two small models here.")
@click.option("--devices", type=click.IntRange(min=2), help="Devices to split over [all GPUs, or up to 4 CPU cores].")
@click.option("--folder", type=FOLDER, help="Folder of the runs [runs/demo-N].")
@click.option("--steps", type=click.IntRange(min=4), help="Optimizer steps of each run, to make it shorter.")
@json_option
def demo_command(devices: int | None, folder: Path | None, steps: int | None) -> Answer:
    """Train a convolutional net on handwritten digits and a small GPT on English text, on one device and on several.

    Then prove that both computed the same, and show the speed-up. Nothing is downloaded.

    \b
    Examples:
      phalanx demo
      phalanx demo --devices 2 --json
    """
    from phalanx.demo.tour import Tour, tour_table
    from phalanx.launch.runfile import default_folder
    from phalanx.report.render import PlainConsole

    where = folder or default_folder("demo")
    result = Tour(folder=where, devices=devices, steps=steps, console=PlainConsole(stderr=True)).walk()
    return Answer(result.to_dict(), lambda _: tour_table(result), 0 if result.equal else NO)
