"""``phalanx bench``: how fast a job is under several plans, measured here."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.apart import Network, measure_apart, network_options, show_apart
from phalanx.cli.measured import measured
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
@network_options
@json_option
def command(
    job: str, counts: tuple[int, ...] | None, plans: tuple[Plan, ...], steps: int, as_json: bool, **network: Any
) -> None:
    """Run JOB for a few steps under each plan and show time, speed-up, efficiency and memory side by side.

    The global batch is the same under every plan. The first steps of each are not timed. Nothing is kept.

    With --hosts, workers are put on so many hosts within this machine, each with a network of its own whose links are
    as slow as asked, and every plan [one replica a host] is shown beside itself on this machine's own network.

    \b
    Examples:
      phalanx bench examples/gpt.py
      phalanx bench examples/digits.py -n 1,2 --steps 40
      phalanx bench examples/gpt.py --plan dp=2 --plan "fsdp=2 zero=3" --json
      phalanx bench examples/gpt.py --hosts 4 --rate 100mbit --delay 20ms
      phalanx bench examples/gpt.py --hosts 2 --slow 1:4x --plan dp=2
    """
    asked = Network(**network)
    asked.refuse(counts)
    from phalanx.launch.jobfile import load_job

    loaded = replace(load_job(job), steps=steps, epochs=None, evaluate=None, metrics=None, evaluate_every=0)
    chosen = list(plans or [Plan(dp=asked.hosts)]) if asked.hosts is not None else _plans(counts, plans)
    _refuse(loaded, chosen)

    from rich.console import Console

    from phalanx.observe.tables import scaled, scaling_table

    if asked.hosts is not None:
        rows, about = measure_apart(loaded, job, chosen, asked, Console(stderr=True))
        show_apart(loaded, rows, about, asked, as_json)
        return
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
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as scratch:
        runs = [
            RunSpec(job=reference, plan=plan, folder=Path(scratch) / str(number)) for number, plan in enumerate(plans)
        ]
        return [measured(job, run, console) for run in runs]
