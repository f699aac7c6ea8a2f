"""``phalanx calibrate``: measures this machine into a cluster file."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from phalanx.cli.output import json_option, print_json
from phalanx.errors import RefusedError, SpecError

if TYPE_CHECKING:
    from phalanx.config import Cluster, Job, Plan
    from phalanx.device_kinds import DeviceKind

_COUNTS = (2, 4)
_STEPS = 40
_SAMPLES = 16  # of a step that computes next to nothing
_PATIENCE, _BUSY = 10.0, 0.3  # seconds to wait for others to rest, and the share of cores they may take


@click.command("calibrate", short_help="Measure this machine, or hosts, into a cluster file.")
@click.option(
    "-o",
    "--output",
    "path",
    type=click.Path(path_type=Path),
    help="The file to write [machine.toml, with --to cluster.toml].",
)
@click.option("--quick", is_flag=True, help="Hardly measure: shows that it works, in seconds.")
@click.option("--to", metavar="TARGET", help="The hosts of ssh:hosts.toml in place of this machine.")
@json_option
def command(path: Path | None, quick: bool, to: str | None, as_json: bool) -> None:
    """Measure this machine's CUDA GPUs, or its cores and what joins its processes, into a TOML file.

    Forecasts with --on machine.toml then use its constants. Nothing else should run meanwhile. Cores take about a
    minute. Of GPUs the kernels of the first are timed, in seconds; their links are the catalog's. With --to it is hosts
    that are asked for their devices and cores, whose figures are the catalog's, and the links between them that are
    measured, in seconds; each host has as many devices as its file says.

    \b
    Examples:
      phalanx calibrate
      phalanx calibrate -o laptop.toml
      phalanx forecast examples/digits.py --plan dp=2 --on machine.toml
      phalanx calibrate --to ssh:hosts.toml -o rack.toml
    """
    from phalanx.device_kinds import accelerator
    from phalanx.hardware.calibrate import default_path

    if to:
        _hosts(to, path or Path("cluster.toml"), quick=quick, as_json=as_json)
        return
    kind = accelerator()
    if kind and not kind.fitted:
        given, fix = f"{kind.count()} {kind.label} devices", f"{kind.visible}= phalanx calibrate"
        allowed = "devices that forecasts were fitted to, or a machine of cores alone"
        raise RefusedError.of(where="calibrate", given=given, allowed=allowed, fix=fix)
    where = path or default_path()
    if kind:
        _gpus(kind, where, quick=quick, as_json=as_json)
        return
    found = _calibrated(quick)
    _write(found, where)
    device, link = found.groups[0].device, found.groups[0].link
    if as_json:
        print_json({"file": str(where), "devices": found.devices, "device": device.name, "measured": device.measured})
        return
    from phalanx.units import show_bytes

    click.echo(f"{found.devices} cores, each {device.peak['fp32'] / 1e9:.0f} GFLOP/s in fp32, ", nl=False)
    click.echo(f"{show_bytes(device.bandwidth)}/s from memory, {device.measured['floor'] * 1e6:.1f} µs an operation")
    click.echo(f"processes hand on {show_bytes(link.bandwidth)}/s after {link.latency * 1e6:.0f} µs")
    click.echo(f"written to {where}: use it with --on {where}")


def _gpus(kind: DeviceKind, where: Path, *, quick: bool, as_json: bool) -> None:
    """Measure the first GPU, write the machine's cluster, and print what was measured."""
    from phalanx.hardware import this_machine
    from phalanx.preflight.measure import QUICK_KERNELS, with_measured_kernels
    from phalanx.units import show_bytes

    found = with_measured_kernels(this_machine(kind), kind, QUICK_KERNELS if quick else None)
    _write(found, where)
    device = found.groups[0].device
    if as_json:
        print_json({"file": str(where), "devices": found.devices, "device": device.name, "measured": device.measured})
        return
    share = device.measured
    click.echo(f"{found.devices} x {device.name}, {show_bytes(device.memory)} each; measured on the first:")
    click.echo(f"bf16 products reach {share['product']:.0%} of the data sheet, causal attention ", nl=False)
    click.echo(f"{share['attention']:.0%} forward and {share['attention_backward']:.0%} backward, memory ", nl=False)
    click.echo(f"{share['stream']:.0%}; an operation takes the host {share['host'] * 1e6:.1f} µs")
    click.echo(f"written to {where}: use it with --on {where}")


def _hosts(to: str, where: Path, *, quick: bool, as_json: bool) -> None:
    """Write what is there, and say what it is."""
    from phalanx.launch.check import survey
    from phalanx.launch.targets.find_target import find_target
    from phalanx.launch.targets.target import AttachedTarget
    from phalanx.preflight.target_cluster import cluster_there
    from phalanx.units import show_bytes, show_seconds

    target = find_target(to)
    if quick or not isinstance(target, AttachedTarget):
        given = "--quick" if quick else f"{target.name}, which chooses its machines only once a run begins"
        fix = f"phalanx calibrate --to {to}" if quick else "phalanx calibrate, on one of its machines"
        raise SpecError.of("--to", given, "hosts by themselves: what is measured there takes seconds", fix)
    said = survey(list(target.hosts()), Path(tempfile.gettempdir()))
    found = cluster_there(said)
    _write(found, where)
    if as_json:
        print_json({"file": str(where), "cluster": str(found), "devices": found.devices, "nodes": found.nodes})
        return
    for group in found.groups:
        click.echo(f"{group.host.name}: {group.per_node} x {group.device.name}, {show_bytes(group.device.memory)} each")
    network = found.network
    said_of = f"catalog: {network.name}" if network.name else f"measured, {show_seconds(network.latency)} a hop"
    click.echo(f"between hosts: {show_bytes(network.bandwidth)}/s ({said_of})")
    click.echo(f"written to {where}: use it with --on {where}")


def _write(found: Cluster, where: Path) -> None:
    """
    Raises:
        SpecError: nothing can be written there.
    """
    try:
        where.write_text(found.to_toml(), encoding="utf-8")
    except OSError as error:
        given, allowed = f"{where}: {error.strerror}", "a file in a folder that exists and can be written to"
        raise SpecError.of(where="-o", given=given, allowed=allowed, fix=f"-o {where.name}") from None


def _calibrated(quick: bool) -> Cluster:
    from phalanx.config import Plan
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
    """Seconds in which a stage hands something on, computing next to nothing.

    Of 1F1B each further micro-batch is handed on and comes back as a gradient before the next one can: a stage between
    others sends two messages for it, one of two stages sends one.
    """
    from phalanx.config import Plan

    many, few = (_step(Plan(pp=stages, micro=micro), steps) for micro in (1, _SAMPLES // stages))
    return max(0.0, (many - few) / (_SAMPLES - stages) / min(2, stages - 1))


def _step(plan: Plan, steps: int) -> float:
    """Seconds of a step that computes next to nothing."""
    from phalanx.api import fit
    from phalanx.config import RunSpec
    from phalanx.report.summary import summarise

    with tempfile.TemporaryDirectory(prefix="phalanx-calibrate-") as scratch:
        spec = RunSpec(job="nothing", plan=plan, folder=Path(scratch) / "run", forecast="none")
        run = fit(_nothing(steps, plan.pp), run=spec, cores=1, watch=False)
        return summarise(run.folder).step_seconds or 0.0


def _nothing(steps: int, layers: int) -> Job:
    import torch

    from phalanx.config import Job

    return Job(
        model=lambda: torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(layers)]),
        data=lambda: torch.utils.data.TensorDataset(torch.ones(64, 1), torch.ones(64, 1)),
        loss=lambda output, batch: (output - batch[1]).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        batch=_SAMPLES,
        steps=steps,
        name="nothing",
    )
