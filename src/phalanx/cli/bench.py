"""``phalanx bench``: how fast a job is under several plans, measured here, in a queue, or on hosts with slow links."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.bench_queue import (
    QUEUE_OPTIONS,
    BenchCommand,
    QueueBench,
    QueueOptions,
    devices_there,
    queue_options,
)
from phalanx.cli.options import PlanText, job_argument
from phalanx.cli.output import json_option, print_json, show_prepared
from phalanx.config import Job, Plan, RunSpec
from phalanx.config.run_files import EVENTS
from phalanx.device_kinds import on_host
from phalanx.errors import Problem, RefusedError, SpecError

if TYPE_CHECKING:
    from rich.console import Console

    from phalanx.launch.hosts import Hosts
    from phalanx.launch.targets import ArrayTarget
    from phalanx.report.comparison import BetweenHosts
    from phalanx.report.summary import RunSummary


def measured(job: Job, run: RunSpec, console: Console, *, label: str = "", hosts: Hosts | None = None) -> RunSummary:
    """Train ``job`` as ``run`` says, a core a worker where it computes on CPUs, and sum it up.

    No forecast is made: cores are for what is measured. ``label`` is that of the progress, the plan where not given.
    """
    from phalanx.api import fit
    from phalanx.events.following import Follower
    from phalanx.parallel import device_kind
    from phalanx.report.progress import progress
    from phalanx.report.summary import summarise

    folder: Path = run.folder
    viewer = progress(console, label=label or str(run.plan), lines=frozenset({"start", "warning"}))
    with Follower(folder / EVENTS, [viewer]) as follower:
        cores = 1 if hosts or on_host(device_kind(run.plan)) else None
        fit(job, run=replace(run, forecast="none"), watch=follower, cores=cores, hosts=hosts)
    return summarise(folder)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostOptions:
    """The hosts that were asked for.

    Attributes:
        hosts: how many; ``None``: none, everything on this machine's own network.
        rate: of each host's link, as written; empty: no limit.
        slow: host and factor of those that compute more slowly.
    """

    hosts: int | None
    rate: str
    delay: str
    loss: str
    slow: tuple[tuple[int, float], ...]

    def made(self, plan: Plan) -> Hosts:
        """Hosts for a plan's ranks, in equal blocks; not yet there.

        Raises:
            SpecError: with what is wrong in the words.
        """
        from phalanx.launch.hosts import Hosts

        count = 1 if self.hosts is None else self.hosts
        each = -(-plan.world_size // max(1, count))
        return Hosts(count, rate=self.rate, delay=self.delay, loss=self.loss, per_host=each)

    def refuse(self, counts: Sequence[int] | None) -> None:
        """Raise what is wrong before anything starts.

        Raises:
            SpecError: what was asked for makes no sense.
            RefusedError: this machine cannot make the hosts.
        """
        if self.hosts is None:
            if given := [name for name in ("rate", "delay", "loss", "slow") if getattr(self, name)]:
                where = f"--{given[0]}"
                raise SpecError.of(where, "without --hosts", "with --hosts", fix=f"--hosts 2 {where} ...")
            return
        if counts is not None:
            raise SpecError.of("-n", "together with --hosts", "plans instead", fix="--hosts 2 --plan dp=2")
        from phalanx.launch.host_network import refuse

        made = self.made(Plan())
        for host, factor in self.slow:
            if not 0 <= host < made.count or not 1 <= factor < 100:
                allowed = f"a host from 0 to {made.count - 1} and how many times slower it is, 1 to 99"
                raise SpecError.of("--slow", f"{host}:{factor:g}", allowed, fix="--slow 1:4x")
        refuse(made.link)

    def __str__(self) -> str:
        parts = [f"{self.hosts} hosts", self.rate, f"{self.delay} one way" if self.delay else ""]
        parts += [f"{self.loss} lost" if self.loss else "", *(f"host {host} {by:g} x slower" for host, by in self.slow)]
        return ", ".join(part for part in parts if part)


class _Slowed(click.ParamType):
    """A host and how much slower it computes, such as ``1:4x``."""

    name = "host:factor"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        if isinstance(value, tuple):
            return value
        host, _, factor = value.partition(":")
        try:
            return int(host), float(factor.strip().removesuffix("x"))
        except ValueError:
            allowed = "a host's number and how many times slower it is"
            raise SpecError.of("--slow", repr(value), allowed, fix="--slow 1:4x") from None


def network_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a ``HostOptions``, each by its field's name."""
    for option in (
        click.option(
            "--slow", type=_Slowed(), multiple=True, help="A host that computes more slowly, 1:4x; repeat it."
        ),
        click.option("--loss", default="", help="Share of packets lost on their way out of a host: 0.1%."),
        click.option(
            "--delay", default="", help="Time out of a host, one way: 20ms. A round trip takes twice as long."
        ),
        click.option("--rate", default="", help="Of each host's link, each way: 100mbit."),
        click.option("--hosts", type=int, help="Measure between so many hosts, made within this machine (needs root)."),
    ):
        function = option(function)
    return function


def measure_apart(
    job: Job, reference: str, plans: Sequence[Plan], network: HostOptions, console: Console
) -> tuple[list[BetweenHosts], dict[str, Any]]:
    """Every plan here and between the hosts, and what the hosts were."""
    from phalanx.report.comparison import BetweenHosts

    rows: list[BetweenHosts] = []
    about: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as scratch:
        for number, plan in enumerate(plans):
            with network.made(plan) as hosts:
                run = RunSpec(job=reference, plan=plan, folder=Path(scratch) / f"{number}-here")
                here = measured(job, run, console, label=f"{plan} here")
                for host, factor in network.slow:
                    hosts.throttle(host, factor)
                run = RunSpec(job=reference, plan=plan, folder=Path(scratch) / f"{number}-apart")
                there = measured(job, run, console, label=f"{plan} on hosts", hosts=hosts)
                # bit/s, seconds and shares of one, and what slows packets and processors
                slow = {str(host): factor for host, factor in network.slow}
                ways = {"carrier": hosts.carrier, "brake": hosts.brake if slow else None}
                about = {"hosts": hosts.count, **asdict(hosts.link), "slow": slow, **ways}
            rows.append(BetweenHosts.of(here, there, [hosts.sent_per_step(host) for host in range(hosts.count)]))
    return rows, about


def show_apart(
    job: Job, rows: Sequence[BetweenHosts], about: dict[str, Any], network: HostOptions, as_json: bool
) -> None:
    """Print what was measured."""
    from phalanx.hardware import this_machine
    from phalanx.report.comparison import apart_table
    from phalanx.report.tables import PlainConsole

    if as_json:
        measured = {"job": job.name, "batch": job.batch, "steps": job.steps, "network": about}
        print_json({**measured, "plans": [asdict(row) for row in rows]})
        return
    stdout = PlainConsole()
    stdout.print(f"{job.name}: {job.batch} samples a step, {job.steps} steps a plan; {network}", highlight=False)
    stdout.print(apart_table(rows), highlight=False)
    cores = this_machine().devices
    most = max(row.workers for row in rows)
    if on_host(rows[0].device) and most > cores:
        note = f"{most} workers share {cores} cores: with a core each they compute faster."
        stdout.print(f"[dim]{note}[/]", highlight=False)


_FAILED = 3
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


@click.command("bench", short_help="Measure a job's speed under several plans.", cls=BenchCommand)
@job_argument
@click.option("-n", "counts", type=_Counts(), help="Devices to measure replicas on [1, 2, 4, ... up to all].")
@click.option(
    "--plan", "plans", type=PlanText(), multiple=True, help="A plan to measure besides one device; repeat it."
)
@click.option("--steps", type=click.IntRange(min=2), default=20, show_default=True, help="Optimizer steps a plan.")
@network_options
@queue_options
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    job: str,
    counts: tuple[int, ...] | None,
    plans: tuple[Plan, ...],
    steps: int,
    as_json: bool,
    **where: Any,
) -> None:
    """Run JOB for a few steps under each plan and show time, speed-up, efficiency and memory side by side.

    The global batch is the same under every plan. The first steps of each are not timed. Nothing is kept.

    With --hosts, workers are put on so many hosts within this machine, each with a network of its own whose links are
    as slow as asked, and every plan [one replica a host] is shown beside itself on this machine's own network.

    With --to slurm, every plan is measured on the cluster's nodes, as a task of one array of jobs, and the command
    waits for them. Options of that target stand beside these, as of phalanx launch. A plan that fails there is named
    with why, and the others go on; the runs' folders are kept, without checkpoints. The same command with the same
    --run finds its array again, should it have been killed meanwhile.

    Exit code 0: all were measured. 2: wrong use; nothing ran. 3: a plan failed.

    \b
    Examples:
      phalanx bench examples/gpt.py
      phalanx bench examples/digits.py -n 1,2 --steps 40
      phalanx bench examples/gpt.py --plan dp=2 --plan "fsdp=2 zero=3" --json
      phalanx bench examples/gpt.py --hosts 4 --rate 100mbit --delay 20ms
      phalanx bench examples/gpt.py --hosts 2 --slow 1:4x --plan dp=2
      phalanx bench train.py --to slurm --nodes 2 --partition gpu --plan dp=16 --plan "fsdp=16"
    """
    queue = QueueOptions(**{name: where.pop(name) for name in QUEUE_OPTIONS})
    asked = HostOptions(**where)
    target = queue.target({f"--{name}": value for name, value in where.items()})
    asked.refuse(counts)
    from phalanx.launch.jobfile import load_job
    from phalanx.train.measured_job import steps_alone

    loaded = steps_alone(load_job(job), steps)
    if target:
        _bench_there(target, queue, ctx.args, BenchOrder(job, loaded, counts, plans), as_json)
        return
    chosen = list(plans or [Plan(dp=asked.hosts)]) if asked.hosts is not None else _plans(counts, plans)
    refuse_plans(loaded, chosen)

    from phalanx.report.tables import PlainConsole

    if asked.hosts is not None:
        rows, about = measure_apart(loaded, job, chosen, asked, PlainConsole(stderr=True))
        show_apart(loaded, rows, about, asked, as_json)
        return
    _show_scaling(loaded, _measure(loaded, job, chosen, PlainConsole(stderr=True)), as_json)


def _show_scaling(
    job: Job, summaries: Sequence[RunSummary], as_json: bool, *, there: Mapping[str, Any] | None = None
) -> None:
    """Print what was measured, each beside the first; ``there``: where else than here, and what failed."""
    from rich.markup import escape

    from phalanx.report.tables import PlainConsole, scaled, scaling_table

    rows = [scaled(summary, summaries[0]) for summary in summaries]
    if as_json:
        measured = {"job": job.name, "batch": job.batch, "steps": job.steps}
        print_json({**measured, "plans": [asdict(row) for row in rows], **(there or {})})
        return
    stdout = PlainConsole()
    stdout.print(f"{job.name}: {job.batch} samples a step, {job.steps} steps a plan", highlight=False)
    if rows:
        stdout.print(scaling_table(rows), highlight=False)
    if any(on_host(row.device) for row in rows):
        stdout.print(f"[dim]{_CPU_NOTE}[/]", highlight=False)
    for one in (there or {}).get("failed", ()):
        stdout.print(f"[red]{one['plan']} failed[/]: {escape(one['why'])}\n    {escape(one['log'])}", highlight=False)


@dataclass(frozen=True, slots=True)
class BenchOrder:
    """What is to be measured: the job's reference, the job as it is measured, numbers of devices, and plans."""

    reference: str
    job: Job
    counts: Sequence[int] | None
    plans: Sequence[Plan]


def _bench_there(target: ArrayTarget, queue: QueueOptions, words: list[str], order: BenchOrder, as_json: bool) -> None:
    """Measure on ``target``, whose options are ``words``; ends the command where a plan failed."""
    from phalanx.launch import Reference
    from phalanx.launch.targets import settled_options

    own = settled_options(target, words)
    plans = _plans(order.counts, order.plans, lambda: devices_there(target, own))
    where = Reference.parse(order.reference)
    bench = QueueBench(
        target=target,
        to=queue.to or target.name,
        options=own,
        folder=queue.place(where.stem),
        reference=str(where),
        job=order.job,
        plans=plans,
        at_once=queue.at_once or 1,
    )
    prepared = bench.prepared()
    if queue.dry_run:
        show_prepared(prepared, as_json=as_json)
        return
    earlier = bench.earlier()
    if not earlier:
        refuse_plans(order.job, [plan.on_any_device for plan in plans])
    found = bench.measure(earlier)
    there = {"to": bench.to, "folder": str(bench.folder), "failed": [asdict(one) for one in found.failed]}
    _show_scaling(order.job, found.summaries, as_json, there=there)
    if found.failed:
        raise click.exceptions.Exit(_FAILED)


def _plans(counts: Sequence[int] | None, plans: Sequence[Plan], devices: Callable[[], int] | None = None) -> list[Plan]:
    """What to measure, the first being what the others are compared with. ``devices``: there are, where not here."""
    from phalanx.hardware import this_machine

    if counts is None and plans:
        counts = [1]
    elif counts is None:
        most = devices() if devices else this_machine().devices
        counts = sorted({*(2**power for power in range(most.bit_length())), most})
    return list(dict.fromkeys([*(Plan(dp=count) for count in counts), *plans]))


def refuse_plans(job: Job, plans: Sequence[Plan]) -> None:
    """Raise what is wrong with any of the plans before the first is measured."""
    from phalanx.launch import look_ahead
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
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as scratch:
        folders = [Path(scratch) / str(number) for number in range(len(plans))]
        runs = [RunSpec(job=reference, plan=plan, folder=each) for plan, each in zip(plans, folders, strict=True)]
        return [measured(job, run, console) for run in runs]
