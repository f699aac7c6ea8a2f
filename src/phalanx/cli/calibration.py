"""``phalanx calibrate``: measure this machine, or hosts, into a cluster file."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from phalanx.cli.options import ANY_PATH
from phalanx.cli.output import Answer, json_option, write_page
from phalanx.config import Job, Plan, RunSpec
from phalanx.errors import RefusedError, SpecError
from phalanx.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from phalanx.config import Cluster

_COUNTS = (2, 4)
_STEPS = 40
_SAMPLES = 16  # of a step that computes next to nothing
_PATIENCE, _BUSY = 10.0, 0.3  # seconds to wait for other processes, and the share of cores they may take


@click.command("calibrate", short_help="Measure this machine, or hosts, into a cluster file.")
@click.option("-o", "--output", "path", type=ANY_PATH, help="File to write [machine.toml, with --to cluster.toml].")
@click.option("--quick", is_flag=True, help="Measure roughly, in seconds, to see that it works.")
@click.option("--to", metavar="TARGET", help="The hosts of ssh:hosts.toml in place of this machine.")
@json_option
def calibrate_command(path: Path | None, quick: bool, to: str | None) -> Answer:
    """Measure this machine's CUDA GPUs, or its cores and the links of its processes, into a TOML file.

    Forecasts with --on machine.toml use its constants. Run nothing else meanwhile. Cores take about a minute; of GPUs
    the kernels of the first are timed, in seconds, and links are the catalog's. With --to the links between hosts are
    measured, in seconds; figures of their devices are the catalog's, and their number is the file's.

    \b
    Examples:
      phalanx calibrate
      phalanx forecast examples/digits.py --plan dp=2 --on machine.toml
      phalanx calibrate --to ssh:hosts.toml -o rack.toml
    """
    from phalanx.hardware.calibrate import default_path

    where = path or (Path("cluster.toml") if to else default_path())
    cluster, lines = _hosts(to, quick=quick) if to else _machine(quick=quick)
    write_page(where, cluster.to_toml(), "-o")
    device = cluster.groups[0].device
    told = {"file": str(where), "cluster": str(cluster), "devices": cluster.devices, "nodes": cluster.nodes}
    told |= {"device": device.name, "measured": device.measured}
    return Answer(told, "\n".join([*lines, f"written to {where}: use it with --on {where}"]))


def _machine(*, quick: bool) -> tuple[Cluster, list[str]]:
    """Return this machine's cluster, with its first GPU or its cores measured, and lines that say the figures."""
    from phalanx.device_kinds import accelerator
    from phalanx.hardware import this_machine
    from phalanx.preflight.measure import QUICK_KERNELS, with_measured_kernels

    kind = accelerator()
    if kind and not kind.fitted:
        given, fix = f"{kind.count()} {kind.label} devices", f"{kind.visible}= phalanx calibrate"
        allowed = "devices that forecasts were fitted to, or a machine of cores alone"
        raise RefusedError.of("calibrate", given, allowed, fix)
    if kind is None:
        found = _cores(quick)
        device, link = found.groups[0].device, found.groups[0].link
        floor = device.measured["floor"] * 1e6
        return found, [
            f"{found.devices} cores, each {device.peak['fp32'] / 1e9:.0f} GFLOP/s in fp32, "
            f"{show_bytes(device.bandwidth)}/s from memory, {floor:.1f} µs an operation",
            f"between processes: {show_bytes(link.bandwidth)}/s after {link.latency * 1e6:.0f} µs",
        ]
    found = with_measured_kernels(this_machine(kind), kind, QUICK_KERNELS if quick else None)
    device, share = found.groups[0].device, found.groups[0].device.measured
    return found, [
        f"{found.devices} x {device.name}, {show_bytes(device.memory)} each; measured on the first:",
        f"bf16 products reach {share['product']:.0%} of the data sheet, causal attention "
        f"{share['attention']:.0%} forward "
        f"and {share['attention_backward']:.0%} backward, memory {share['stream']:.0%}; "
        f"an operation takes the host {share['host'] * 1e6:.1f} µs",
    ]


def _hosts(to: str, *, quick: bool) -> tuple[Cluster, list[str]]:
    """Return the cluster of a target's hosts, with their links measured, and lines that say the figures."""
    from phalanx.launch.check import survey
    from phalanx.launch.targets.find_target import find_target
    from phalanx.launch.targets.target import AttachedTarget
    from phalanx.preflight.target_cluster import cluster_there

    target = find_target(to)
    if quick or not isinstance(target, AttachedTarget):
        given = "--quick" if quick else f"{target.name}, which chooses its machines only once a run begins"
        fix = f"phalanx calibrate --to {to}" if quick else "phalanx calibrate, on one of its machines"
        raise SpecError.of("--to", given, "hosts by themselves: what is measured there takes seconds", fix)
    found = cluster_there(survey(list(target.hosts()), Path(tempfile.gettempdir())))
    network, lines = found.network, list[str]()
    for group in found.groups:
        memory = show_bytes(group.device.memory)
        lines.append(f"{group.host.name}: {group.per_node} x {group.device.name}, {memory} each")
    source = f"catalog: {network.name}" if network.name else f"measured, {show_seconds(network.latency)} a hop"
    return found, [*lines, f"between hosts: {show_bytes(network.bandwidth)}/s ({source})"]


def _cores(quick: bool) -> Cluster:
    from phalanx.hardware import cores, this_machine
    from phalanx.hardware.calibrate import calibrated, wait_until_quiet
    from phalanx.preflight.measure import measure

    if (busy := wait_until_quiet(0.0 if quick else _PATIENCE)) > _BUSY:
        click.echo(f"note: other processes keep {busy:.0%} of the cores busy; constants will be off", err=True)
    sweeps = measure(cores(), _COUNTS, quick=quick)
    steps = 5 if quick else _STEPS
    rest = {count: _step(Plan(dp=count), steps) for count in (1, *_COUNTS)}
    relay = {count: _relay(count, steps // 2) for count in _COUNTS}
    return calibrated(this_machine(), replace(sweeps, rest=rest, relay=relay))


def _relay(stages: int, steps: int) -> float:
    """Return the seconds in which a stage that computes next to nothing sends a result.

    Under 1F1B a stage between others sends two messages for each further micro-batch, one of two stages sends one.
    """
    many, few = (_step(Plan(pp=stages, micro=micro), steps) for micro in (1, _SAMPLES // stages))
    return max(0.0, (many - few) / (_SAMPLES - stages) / min(2, stages - 1))


def _step(plan: Plan, steps: int) -> float:
    """Return the seconds of a step that computes next to nothing."""
    from phalanx.api import fit
    from phalanx.report.summary import summarise

    with tempfile.TemporaryDirectory(prefix="phalanx-calibrate-") as scratch:
        spec = RunSpec(job="nothing", plan=plan, folder=Path(scratch) / "run", forecast="none")
        run = fit(_nothing(steps, plan.pp), run=spec, cores=1, watch=False)
        return summarise(run.folder).step_seconds or 0.0


def _nothing(steps: int, layers: int) -> Job:
    import torch

    return Job(
        model=lambda: torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(layers)]),
        data=lambda: torch.utils.data.TensorDataset(torch.ones(64, 1), torch.ones(64, 1)),
        loss=lambda output, batch: (output - batch[1]).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        batch=_SAMPLES,
        steps=steps,
        name="nothing",
    )
