"""The steps of a mesh, which all of its ranks take together: what one rank does of each, measures and records."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

from phalanx.comm import Place, default_process_group, device_for, place_within
from phalanx.config import Job, RunSpec
from phalanx.config.sync import within
from phalanx.data import Ledger, StepBatch
from phalanx.errors import is_out_of_memory
from phalanx.events import EventLog
from phalanx.hardware import peak_memory
from phalanx.parallel import device_kind, devices_here
from phalanx.train.assembly import Assembly, Findings, build
from phalanx.train.consistency import same_length, same_stream
from phalanx.train.evaluate import Evaluation, evaluate
from phalanx.train.loop import Stepper
from phalanx.train.lr_schedule import RunStart, resume_notes
from phalanx.train.memory_use import MeasuredStep
from phalanx.train.metrics import Metrics
from phalanx.train.observer import AssemblyScene, Observer
from phalanx.train.run_recorder import Lap, RunRecorder
from phalanx.train.state import come_together, newest_checkpoint, restore, save, traffic
from phalanx.train.timeline import Listener, only_step


@contextmanager
def rank_of_mesh(
    job: Job, run: RunSpec, place: Place, report: Callable[[int], None], *, observer: Observer, findings: Findings
) -> Generator[tuple[MeshStepper, RunRecorder]]:
    """Within, this process is the rank of the mesh that ``place.rank`` is, restored where the run resumes. Collective.

    Raises:
        RefusedError: if the plan cannot serve the job.
        CheckpointError: if there is nothing to resume from.
    """
    device = device_for(place, device_kind(run.plan, devices_here(run.plan, place)))
    with default_process_group(place_within(run.plan, place), device):
        path, first = newest_checkpoint(run) if run.resume else (None, 0)
        assembly = build(job, run.plan, place, device, start=RunStart.of(run, first), findings=findings)
        assembly.notes.extend(findings.causes)
        loader = assembly.loader
        if path:
            restore(path, job, assembly)
            assembly.notes.extend(resume_notes(job, run.folder, step=first, total_steps=loader.total_steps))
        assembly.step.observer = observer
        observer.built(AssemblyScene(assembly))
        late = assembly.device == "cuda"
        ledger, writes = _ledger(run, place, assembly.step.progress.step), place.rank == 0
        with RunRecorder(run, ledger=ledger, writes=writes, total_steps=loader.total_steps, late=late) as recorder:
            recorder.start(
                job,
                advice=assembly.advice,
                resumed=path,
                world_size=place.world_size,
                device=assembly.device,
                samples=loader.length,
                first_step=assembly.step.progress.step,
                parameters=assembly.parameters,
                notes=assembly.notes,
            )
            yield MeshStepper(job, run, place.rank, assembly, recorder, report), recorder


def _ledger(run: RunSpec, place: Place, first_step: int) -> Ledger | None:
    """The ledger of this rank's samples; none where it shares them with ranks before it, which hold other slices."""
    plan = run.plan
    at = plan.coordinate(place.rank)
    if at["pp"] or at["cp"] or at["tp"]:
        return None
    reader, readers = plan.part(place.rank) // plan.threads, plan.replicas // plan.threads
    return Ledger(run.folder / "ledger", rank=reader, first_step=first_step, world_size=readers)


@final
class MeshStepper(Stepper):
    """One rank's side of the steps; every call but the properties is collective."""

    def __init__(
        self,
        job: Job,
        run: RunSpec,
        rank: int,
        assembly: Assembly,
        recorder: RunRecorder,
        report: Callable[[int], None],
    ) -> None:
        self._job, self._run, self._rank, self._assembly = job, run, rank, assembly
        self._recorder, self._report, self._ended = recorder, report, False
        progress, loader, replicas = assembly.step.progress, assembly.loader, assembly.local_sgd
        self._samples_before = progress.samples
        self._batches = iter(loader)
        self._evaluation_data = _evaluation_data(job)
        self._measured = MeasuredStep(assembly.step, assembly.device)
        only = only_step(assembly.device, progress.step, loader.total_steps)
        in_mesh = rank if replicas is None else replicas.across.rank
        self._listener = Listener(assembly.layout.holdings, within(run.plan), in_mesh, only)
        self._record_news()

    @property
    def taken(self) -> int:
        return self._assembly.step.progress.step

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def samples(self) -> int:
        return self._assembly.step.progress.samples - self._samples_before

    def steps(self, pause: int | None) -> Iterator[tuple[StepBatch, Metrics, Lap | None]]:
        step, stream = self._assembly.step, self._assembly.loader.length is None
        for batch in self._batches:
            self._report(batch.step)
            if stream:
                same_stream(batch)
            step.observer.begins(batch)
            with self._listener.around(batch.step), self._tells_where_memory_runs_out():
                metrics = self._measured(batch)
            yield batch, metrics, step.seconds
            self._record_news()
            if self.taken == pause:
                break
        else:
            self._ended = True
            if stream:
                same_stream(None)
        step.settle()  # no evaluation and no checkpoint of a loss that is not a number
        if self._ended:
            step.sync.together()
            self._record_news()

    def evaluate(self) -> Evaluation | None:
        if self._evaluation_data is None:
            return None
        return evaluate(self._job, self._run.plan, self._assembly, self._evaluation_data)

    def save(self, folder: Path, *, keep: int) -> Path | None:
        come_together(self._assembly)
        self._record_news()
        if self._assembly.local_sgd and not self._assembly.local_sgd.across.counts:
            return None  # it equals the replica that is saved
        return save(folder, self._job, self._assembly, keep=keep)

    def finish(self) -> list[tuple[str, dict[str, Any]]]:
        assembly, found = self._assembly, list[tuple[str, dict[str, Any]]]()
        if kinds := ", ".join(sorted(self._measured.uncounted)):
            found.append(("warning", {"message": f"memory: the tensors of these kinds are not counted: {kinds}"}))
        across = assembly.local_sgd.across if assembly.local_sgd else None
        for event in self._listener.events():
            found.append(("timeline", event | ({"rank": across.named(event["rank"])} if across else {})))
        found += [("traffic", event) for event in traffic(assembly.layout.holdings)]
        everywhere = assembly.from_every_rank({"peak_bytes": peak_memory(), **asdict(self._measured.parts())})
        return [*found, *(("memory", {"rank": rank, **parts}) for rank, parts in enumerate(everywhere))]

    def _record_news(self) -> None:
        sharing, replicas = self._assembly.step.sharing, self._assembly.local_sgd
        for shift in sharing.news() if sharing else ():
            self._recorder.write("shares", **asdict(shift))
        for averaging in replicas.news() if replicas else ():
            self._recorder.write("sync", **asdict(averaging))

    @contextmanager
    def _tells_where_memory_runs_out(self) -> Generator[None]:
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if is_out_of_memory(type(error).__name__, str(error)):
                with suppress(Exception), EventLog(self._run.folder / "events.jsonl") as log:
                    held = asdict(self._measured.parts())
                    log.write("memory", rank=self._rank, peak_bytes=peak_memory(), **held)
            raise


def _evaluation_data(job: Job) -> Any:
    if job.evaluate is None:
        return None
    data = job.evaluate()
    same_length(len(data) if hasattr(data, "__len__") else None, "job.evaluate")
    return data
