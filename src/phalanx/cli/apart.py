"""``phalanx bench --hosts``: how fast a job is between several hosts with slow links, and beside it on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from phalanx.cli.measured import measured
from phalanx.errors import Problem, SpecError
from phalanx.spec import Job, Plan, RunSpec

if TYPE_CHECKING:
    from rich.console import Console

    from phalanx.launch.hosts import Hosts
    from phalanx.observe.apart_table import Apart


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """The hosts that were asked for.

    Attributes:
        hosts: how many; ``None``: none, everything on this machine's own network.
        rate: of each host's link, as written; empty: no limit.
        delay: one way, as written.
        loss: share of packets, as written.
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
                raise _wrong(where, "without --hosts", "with --hosts", fix=f"--hosts 2 {where} ...")
            return
        if counts is not None:
            raise _wrong("-n", "together with --hosts", "plans instead", fix="--hosts 2 --plan dp=2")
        from phalanx.launch.hosts import refuse

        made = self.made(Plan())
        for host, factor in self.slow:
            if not 0 <= host < made.count or not 1 <= factor < 100:
                allowed = f"a host from 0 to {made.count - 1} and how many times slower it is, 1 to 99"
                raise _wrong("--slow", f"{host}:{factor:g}", allowed, fix="--slow 1:4x")
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
            raise _wrong(
                "--slow", repr(value), "a host's number and how many times slower it is", fix="--slow 1:4x"
            ) from None


def _wrong(where: str, given: str, allowed: str, *, fix: str) -> SpecError:
    return SpecError([Problem(where=where, given=given, allowed=allowed, fix=fix)])


def network_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a ``Network``, each by its field's name."""
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
    job: Job, reference: str, plans: Sequence[Plan], network: Network, console: Console
) -> tuple[list[Apart], dict[str, Any]]:
    """Every plan here and between the hosts, and what the hosts were."""
    from phalanx.observe.apart_table import Apart

    rows: list[Apart] = []
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
                about = _about(hosts, network)
            rows.append(Apart.of(here, there, [hosts.sent_per_step(host) for host in range(hosts.count)]))
    return rows, about


def show_apart(job: Job, rows: Sequence[Apart], about: dict[str, Any], network: Network, as_json: bool) -> None:
    """Print what was measured."""
    from rich.console import Console

    from phalanx.cli.output import print_json
    from phalanx.hardware import this_machine
    from phalanx.observe.apart_table import apart_table

    if as_json:
        measured = {"job": job.name, "batch": job.batch, "steps": job.steps, "network": about}
        print_json({**measured, "plans": [asdict(row) for row in rows]})
        return
    stdout = Console()
    stdout.print(f"{job.name}: {job.batch} samples a step, {job.steps} steps a plan; {network}", highlight=False)
    stdout.print(apart_table(rows), highlight=False)
    cores = this_machine().devices
    most = max(row.workers for row in rows)
    if rows[0].device == "cpu" and most > cores:
        stdout.print(
            f"[dim]{most} workers share {cores} cores: with a core each they compute faster.[/]", highlight=False
        )


def _about(hosts: Hosts, network: Network) -> dict[str, Any]:
    """Bit/s, seconds and shares of one, and what slows packets and processors."""
    slow = {str(host): factor for host, factor in network.slow}
    ways = {"carrier": hosts.carrier, "brake": hosts.brake if slow else None}
    return {"hosts": hosts.count, **asdict(hosts.link), "slow": slow, **ways}
