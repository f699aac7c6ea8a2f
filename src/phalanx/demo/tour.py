"""The demo: each job on one device, on all of them, and proven; then all results in one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import click
from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from phalanx.api import fit, prove
from phalanx.config import Cluster, Job, Plan, RunSpec
from phalanx.config.plan import Device
from phalanx.config.run_files import EVENTS
from phalanx.device_kinds import accelerator, accelerator_count
from phalanx.events.following import Follower
from phalanx.hardware import cluster, cores
from phalanx.hardware.catalog import generic
from phalanx.launch.jobfile import load_job
from phalanx.report.drawing import draw
from phalanx.report.progress import Waiting, progress
from phalanx.report.summary import RunSummary, summarise
from phalanx.report.tables import Scaled, scaled, scaled_cells
from phalanx.verify import Proof

JOBS = {
    "phalanx.demo.jobs.digits:job": "a convolutional net reads handwritten digits",
    "phalanx.demo.jobs.gpt:job": "a small GPT learns English from Python's own help texts",
}
_MOST_CORES = 4
_PROOF_STEPS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """One run of the demo.

    Attributes:
        scaled: its speed beside that of one device.
        evaluation: of the trained model: ``loss``, ``samples``, ``metrics``.
        equal: whether the plan was proven equal to one device; ``None`` for the run on one device itself.
        difference: the largest relative difference of losses, gradients and parameters in the proof.
    """

    job: str
    scaled: Scaled
    evaluation: dict[str, Any] | None
    folder: str
    equal: bool | None
    difference: dict[str, float] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The demo's runs, in order."""

    machine: Cluster
    stops: tuple[Stop, ...]

    @property
    def equal(self) -> bool:
        return all(stop.equal is not False for stop in self.stops)

    def to_dict(self) -> dict[str, Any]:
        return {"machine": str(self.machine), "equal": self.equal, "runs": [asdict(stop) for stop in self.stops]}


@final
class Tour:
    """The demo on this machine.

    Args:
        folder: for its run folders.
        devices: to split over; by default all accelerators or up to 4 cores, and at least 2 processes.
        steps: of each run, in place of the jobs' own length.
    """

    def __init__(self, *, folder: Path, devices: int | None, steps: int | None, console: Console) -> None:
        self._folder, self._steps, self._console = folder, steps, console
        kind, gpus = accelerator(), accelerator_count()
        if kind and gpus >= (devices or 2):
            self._machine = cluster(f"{devices or gpus}x{generic(kind.name).device.name}")
        else:
            self._machine = cluster(f"{devices or max(2, min(cores(), _MOST_CORES))}xcpu")
        # a GPU for one run and cores for the other would be no comparison
        self._device: Device = "cpu" if self._kind == "cpu" and gpus else "auto"

    @property
    def _kind(self) -> str:
        return self._machine.groups[0].device.kind

    def walk(self) -> Result:
        """Run everything; each run leaves its folder."""
        self._greet()
        stops = [stop for reference, what in JOBS.items() for stop in self._job(reference, what)]
        return Result(machine=self._machine, stops=tuple(stops))

    def _greet(self) -> None:
        devices, kind = self._machine.devices, "CPU core" if self._kind == "cpu" else "GPU"
        on = f"{devices} {kind}s: two jobs, each on 1 and on {devices} of them."
        self._console.print(f"[bold]Phalanx demo[/] on {on}")
        if self._kind == "cpu" and devices > cores():
            few = f"{cores()} core" if cores() == 1 else f"{cores()} cores"
            self._console.print(f"[yellow]{devices} processes share {few} here: the same result, less speed-up.[/]")

    def _job(self, reference: str, what: str) -> list[Stop]:
        job = load_job(reference)
        plan = Plan(dp=min(self._machine.devices, job.batch), device=self._device)
        self._console.print(f"\n[bold]{escape(job.name)}[/]: {what}, {job.batch} samples a step\n", highlight=False)
        single = self._train(job, reference, Plan(device=self._device))
        drawn = draw(plan, batch=job.batch, device=self._kind, width=76)
        click.echo("\n" + "\n".join(f"  {line}" for line in drawn.splitlines()) + "\n", err=True)
        split = self._train(job, reference, plan)
        steps = min(_PROOF_STEPS, self._steps or _PROOF_STEPS)
        with Waiting(self._console, f"{plan}: proving that it computes what one device computes") as waiting:
            proof = prove(job, plan, steps=steps, watch=waiting)
        verdict = "[green]equal[/] to one device" if proof.equal else f"[red]not equal[/]: {escape(proof.first)}"
        self._console.print(f"  {plan} is {verdict} ({steps} steps compared)", highlight=False)
        return [_stop(job, single, single), _stop(job, split, single, proof)]

    def _train(self, job: Job, reference: str, plan: Plan) -> RunSummary:
        folder = self._folder / f"{job.name}-{plan.kind if plan.kind == 'single' else f'dp{plan.dp}'}"
        viewer = progress(self._console, label=f"{plan!s:<7}", lines=frozenset({"warning"}))
        run = RunSpec(job=reference, plan=plan, folder=folder, steps=self._steps, forecast="none")
        with Follower(folder / EVENTS, [viewer]) as follower:
            fit(job, run=run, watch=follower, cores=1 if self._kind == "cpu" else None)
        return summarise(folder)


def _stop(job: Job, summary: RunSummary, single: RunSummary, proof: Proof | None = None) -> Stop:
    what = {"job": job.name, "evaluation": summary.evaluation, "folder": summary.folder}
    proven = {"equal": proof and proof.equal, "difference": proof and proof.largest}
    return Stop(**what, **proven, scaled=scaled(summary, single))  # pyrefly: ignore


def tour_table(result: Result) -> RenderableType:
    """Return a table of all runs and their folders."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    right = ("time\nper step", "samples\n/s", "speed-\nup", "effi-\nciency", "peak\nmemory")
    for heading in ("job", "plan", *right, "after\ntraining", "equal to\n1 device"):
        table.add_column(heading, justify="right" if heading in right else "left", no_wrap=True)
    for stop in result.stops:
        row = stop.scaled
        table.add_row(
            stop.job, row.plan, *scaled_cells(row), _final(stop), _equal(stop), end_section=stop.equal is not None
        )
    return Group("", table, *_footnotes(result))


def _final(stop: Stop) -> str:
    if stop.evaluation is None:
        return ""
    metrics = stop.evaluation["metrics"] or {"loss": stop.evaluation["loss"]}
    name, value = next(iter(metrics.items()))
    return f"{name}\n{value:.4g}"


def _equal(stop: Stop) -> str:
    if stop.equal is None or stop.difference is None:
        return "[dim]itself[/]"
    by = max(stop.difference["loss"], stop.difference["gradient"])
    return f"{'[green]yes[/]' if stop.equal else '[red]no[/]'}, by\n{by:.0e}"


def _footnotes(result: Result) -> Sequence[RenderableType]:
    notes = ["Equal: the largest relative difference of any loss or first-step gradient."]
    if result.machine.groups[0].device.kind == "cpu":
        notes.append("A device here is one CPU core; the single process computes on one, too.")
    notes += ["Peak memory: the largest of any rank.", "", "Runs:"]
    notes += [f"  {stop.folder}" for stop in result.stops]
    notes += ["", f"Yourself: phalanx train {next(iter(JOBS)).removesuffix(':job')} -n {result.machine.devices}"]
    return [f"[dim]{escape(note)}[/]" for note in notes]
