"""Training runs for a proof, through the loop of every run, and the reading of their last checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from safetensors.torch import load, save_file
from torch import Tensor

from phalanx.checkpoint import sections
from phalanx.checkpoint.sections import MODEL, OPTIMIZER, name_in, put_in, take_out
from phalanx.comm import Place, default_process_group, device_for
from phalanx.config import Job, Plan, RunSpec, Schedule
from phalanx.config.run_files import CHECKPOINTS
from phalanx.launch.local import launch
from phalanx.launch.torch_warmup import make_ready
from phalanx.train import loop
from phalanx.train.assembly import build
from phalanx.train.findings import Findings
from phalanx.train.interruptions import LauncherLink
from phalanx.train.observer import AssemblyScene
from phalanx.train.state import restore
from phalanx.verify.module_trace import Tracing, traces_of
from phalanx.verify.record import AVERAGE, END, RunRecord, record_of, workers_of
from phalanx.verify.recording import Recording
from phalanx.witness.dropout_off import dropout_off

Watch = Callable[[], None] | None


def capture(
    given: Job,
    plan: Plan,
    folder: Path,
    watch: Watch = None,
    *,
    findings: Findings | None = None,
    checkpoint_every: int = 0,
) -> RunRecord:
    """Train ``given``, from ``proven``, under ``plan`` as ``phalanx train`` does, and return a record of the run.

    Tensors, and the run itself, are written into ``folder``; its checkpoint is read back. ``watch`` is called ten times
    a second meanwhile. ``findings`` come from a trace of the job.

    Raises:
        WorkerError: if the run failed, or its checkpoint cannot be loaded.
    """
    run = replace(_run(given, plan, folder), checkpoint_every=checkpoint_every, keep=4)
    answers = _trained(given, run, lambda place: Recording(folder, place.rank), watch, findings)
    first, workers = 0, workers_of([])
    if plan.server:  # the first of the servers has looked on, for all
        workers = workers_of(answers[: plan.dp])
        first, answers = plan.dp, answers[plan.dp : plan.dp + 1]
    record, path = record_of(answers, folder, first, plan.after), Path(answers[0]["checkpoint"])
    saved, loaded = read_back(given, path, folder)
    found = replace(record, workers=workers, saved=saved, loaded=loaded)
    return _with_average(found) if given.average else found


def resumed(given: Job, plan: Plan, folder: Path, at: int, watch: Watch = None) -> RunRecord:
    """Resume the run of a capture in ``folder`` from its checkpoint after step ``at``; return the record of its end.

    Raises:
        WorkerError: if the run failed.
    """
    run, there = replace(_run(given, plan, folder), resume=True), folder / "resumed"
    there.mkdir()
    for path in (run.folder / CHECKPOINTS).glob("step-*"):
        if int(path.name.removeprefix("step-")) > at:
            rmtree(path)
    answers = _trained(given, run, lambda place: Recording(there, place.rank), watch)
    first = plan.dp if plan.server else 0
    answers = answers[first : first + 1] if plan.server else answers
    record = record_of(answers, there, first, max(0, plan.after - at))
    return _with_average(replace(record, saved=_saved(Path(answers[0]["checkpoint"])))) if given.average else record


def _with_average(record: RunRecord) -> RunRecord:
    all_of_it = take_out(sections.AVERAGE, record.saved)
    buffers = {name: all_of_it.pop(name) for name in record.buffers[END] if name in all_of_it}
    values, kept = {**record.values, AVERAGE: all_of_it}, {**record.buffers, AVERAGE: buffers}
    return replace(record, values=values, buffers=kept)


def proven(job: Job, steps: int, taken: int | None = None) -> Job:
    """Return the job as a proof trains it, for ``steps`` steps.

    If a different number is ``taken``, learning rates are still those of a run of ``steps``.
    """

    def meant(schedule: Schedule) -> Schedule:
        ends = taken not in (None, steps) and schedule.total_steps is None and schedule.decay in ("linear", "cosine")
        return replace(schedule, total_steps=steps) if ends else schedule

    schedule = meant(job.lr_schedule)
    phases = [replace(one, schedule=meant(Schedule.of(one.schedule))) if one.schedule else one for one in job.phases]
    best = replace(job.best, patience=None) if job.best else None  # to its end; a scheduler may follow its metric
    given: dict[str, Any] = {"steps": taken or steps, "epochs": None, "schedule": schedule, "best": best}
    return replace(job, phases=phases, **given)


def traced(record: RunRecord, job: Job, plan: Plan, folder: Path, watch: Watch = None) -> RunRecord:
    """Return ``record`` with the traffic of modules in the first step, which is repeated for it."""
    answers = _trained(proven(job, 1), _run(job, plan, folder), lambda place: Tracing(folder, plan), watch)
    traces, auxiliary = traces_of(answers, folder)
    return replace(record, traces=traces, auxiliary=auxiliary)


def _run(job: Job, plan: Plan, folder: Path) -> RunSpec:
    return RunSpec(job=job.name, plan=plan, folder=folder / "run", forecast="none")


def _trained(
    given: Job,
    run: RunSpec,
    look: Callable[[Place], Recording | Tracing],
    watch: Watch,
    findings: Findings | None = None,
) -> list[dict[str, Any]]:
    def work(place: Place, report: Callable[[int], None]) -> dict[str, Any]:
        observer = look(place)
        with dropout_off():
            loop.train(given, run, place, LauncherLink(report=report), observer=observer, findings=findings)
        return observer.answer

    make_ready(run.plan)
    import_module("phalanx.checkpoint.store")  # once, for the workers that save and for reading back here
    return launch(work, run.plan.processes, watch=watch)


def read_back(job: Job, path: Path, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the content of the checkpoint ``path``, and the values of one device that resumes from it.

    By ``model.<name>`` and ``optimizer.<parameter>.<key>``; both are read at the same time. ``folder`` is for files.

    Raises:
        WorkerError: if the checkpoint cannot be loaded.
    """
    saved: dict[str, Tensor] = {}
    file = folder / "loaded.safetensors"

    def meanwhile() -> None:
        if not saved:
            saved.update(_saved(path))

    def work(place: Place, report: Callable[[int], None]) -> Any:
        plan = Plan(device="cpu")
        device = device_for(place, "cpu")
        with default_process_group(place, device):
            assembly = build(job, plan, place, device)
            restore(path, job, assembly)
            scene = AssemblyScene(assembly)
            found = put_in(MODEL, {**scene.values(), **scene.buffers()})
            found |= {
                name_in(OPTIMIZER, f"{name}.{key}"): tensor
                for name, state in scene.state().items()
                for key, tensor in state.items()
                if isinstance(tensor, Tensor)
            }
            found["progress.step"] = torch.tensor(float(assembly.step.progress.step))
            save_file({name: _packed(tensor) for name, tensor in found.items()}, file)

    launch(work, 1, watch=meanwhile)
    meanwhile()
    return saved, load(file.read_bytes())


def _saved(path: Path) -> dict[str, Tensor]:
    from phalanx import checkpoint
    from phalanx.checkpoint.format import Manifest

    stored = Manifest.read(path).tensors
    found = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in stored.items()}
    checkpoint.load(path, found)
    return found


def _packed(tensor: Tensor) -> Tensor:
    # safetensors takes no tensor in another order of memory, such as channels last
    return tensor.detach().clone(memory_format=torch.contiguous_format)
