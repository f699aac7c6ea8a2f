"""The steps of a mesh, taken by all its ranks together: one rank's work, measurements and records."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self, final

from phalanx.checkpoint import BackgroundSaver, Saving, resume_newest
from phalanx.comm import Place, alike, default_process_group, device_for, place_within
from phalanx.config import Job, RunSpec
from phalanx.config.run_files import CHECKPOINTS, EVENTS, LEDGER
from phalanx.config.sync import within
from phalanx.data import Ledger, StepBatch
from phalanx.data.loader import data_facts
from phalanx.device_kinds import kind_named, on_host
from phalanx.errors import CheckpointError, is_out_of_memory
from phalanx.events import EventLog
from phalanx.hardware import peak_memory
from phalanx.parallel import device_kind, devices_here
from phalanx.parallel.buffer_sync import running_statistics
from phalanx.train.accidents import Accidents, RollBackError
from phalanx.train.assembly import Assembly, build
from phalanx.train.build_model import make_data
from phalanx.train.consistency import same_length, same_stream
from phalanx.train.drift import DriftWatch
from phalanx.train.evaluate import Evaluation, evaluate
from phalanx.train.findings import Findings
from phalanx.train.frozen_values import refuse_moved
from phalanx.train.interruptions import Interruptions, LauncherLink
from phalanx.train.loop import Stepper, StepsLostError
from phalanx.train.lr_schedule import RunStart, none_left, resume_notes
from phalanx.train.memory_use import MeasuredStep
from phalanx.train.metrics import Metrics
from phalanx.train.observer import AssemblyScene, Observer
from phalanx.train.run_recorder import Lap, RunRecorder
from phalanx.train.state import come_together, frozen_fingerprints, restore, to_save, traffic, training_state
from phalanx.train.timeline import Listener, only_step


@contextmanager
def rank_of_mesh(
    job: Job, run: RunSpec, place: Place, link: LauncherLink, *, observer: Observer, findings: Findings
) -> Generator[tuple[MeshStepper, RunRecorder]]:
    """Yield the rank ``place.rank`` of the mesh, restored if the run resumes. Collective.

    Raises:
        RefusedError: if the plan cannot serve the job.
        CheckpointError: if there is no checkpoint to resume from.
    """
    device = device_for(place, device_kind(run.plan, devices_here(run.plan, place)))
    with default_process_group(place_within(run.plan, place), device, run.plan.device):

        def assembled(path: Path | None) -> Assembly:
            first = training_state(path)["step"] if path else 0
            assembly = build(job, run.plan, place, device, start=RunStart.of(run, first), findings=findings)
            assembly.notes.extend(findings.causes)
            if path:
                restore(path, job, assembly)
                total = assembly.loader.total_steps
                assembly.notes.extend(resume_notes(job, run.folder, step=first, total_steps=total))
                assembly.advice.extend(none_left(first, total))
            assembly.frozen.update(frozen_fingerprints(assembly) if run.checkpoint == "trainable" else {})
            return assembly

        path, damaged = None, list[str]()
        if run.resume:
            path, assembly, damaged = resume_newest(run.folder / CHECKPOINTS, assembled)
        else:
            assembly = assembled(None)
        held = {**assembly.layout.parameters, **running_statistics(assembly.layout.module)}
        own = place_within(run.plan, place).rank
        assembly.step.drift = DriftWatch.of(within(run.plan), own, held, run.drift, run.drift_every)
        assembly.step.observer = observer
        observer.built(AssemblyScene(assembly))
        late = not on_host(assembly.device)
        how = {"writes": place.rank == 0, "total_steps": assembly.loader.total_steps, "late": late}
        with RunRecorder(run, ledger=_ledger(run, place, assembly.step.progress.step), **how) as recorder:
            recorder.start(
                job,
                advice=[*damaged, *assembly.advice],
                resumed=path,
                placement=findings.placement,
                world_size=place.world_size,
                device=assembly.device,
                **data_facts(assembly.loader),
                first_step=assembly.step.progress.step,
                parameters=assembly.parameters,
                notes=assembly.notes,
            )
            _await_start(assembly)
            writer = _event_writer(run, place, recorder)
            assembly.step.meets_accidents(lambda phase: Accidents(run, writer, phase=phase))
            with MeshStepper(job, run, place, assembly, recorder, link) as stepper:
                yield stepper, recorder


def _await_start(assembly: Assembly) -> None:
    """Wait until the log has the start event, so that no rank's error is logged before it. Collective."""
    if assembly.local_sgd:
        assembly.from_every_rank(None)
    else:
        alike(None)


def _event_writer(run: RunSpec, place: Place, recorder: RunRecorder) -> Callable[..., None] | None:
    if run.plan.sync == "each" or place.rank == 0:
        return recorder.write

    def write(event: str, **fields: Any) -> None:
        with EventLog(run.folder / EVENTS) as log:
            log.write(event, **fields)

    return write if place_within(run.plan, place).rank == 0 else None


def _ledger(run: RunSpec, place: Place, first_step: int) -> Ledger | None:
    plan, at = run.plan, run.plan.coordinate(place.rank)
    if at["pp"] or at["cp"] or at["tp"]:
        return None
    reader, readers = plan.part(place.rank) // plan.threads, plan.replicas // plan.threads
    return Ledger(run.folder / LEDGER, rank=reader, first_step=first_step, world_size=readers)


@final
class MeshStepper(Stepper):
    """One rank's side of the steps; every call but the properties is collective."""

    def __init__(
        self, job: Job, run: RunSpec, place: Place, assembly: Assembly, recorder: RunRecorder, link: LauncherLink
    ) -> None:
        self._job, self._run, self._place, self._assembly = job, run, place, assembly
        self._saver = BackgroundSaver(ranks_here=place.workers_here)
        self._recorder, self._report, self._ended = recorder, link.report, False
        progress, loader, replicas = assembly.step.progress, assembly.loader, assembly.local_sgd
        self._samples_before = progress.samples
        self._batches = iter(loader)
        self._evaluation_data = evaluation_data(job)
        self._measured = MeasuredStep(assembly.step, kind_named(assembly.device).torch_type)
        only = only_step(assembly.device, progress.step, loader.total_steps)
        in_mesh = place.rank if replicas is None else replicas.across.rank
        self._listener = Listener(assembly.layout.holdings, within(run.plan), in_mesh, only)
        self._record_news()

    @property
    def assembly(self) -> Assembly:
        """Return the job laid out on this rank."""
        return self._assembly

    @property
    def taken(self) -> int:
        return self._assembly.step.progress.step

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def samples(self) -> int:
        return self._assembly.step.progress.samples - self._samples_before

    def steps(self, pause: int | None, interruptions: Interruptions) -> Iterator[tuple[StepBatch, Metrics, Lap | None]]:
        while (batch := self.next_batch()) is not None:
            yield batch, self.take(batch), self._assembly.step.seconds
            self.stepped()
            if interruptions.reached(self.taken) or self.taken == pause:
                break
        self.settle()

    def next_batch(self) -> StepBatch | None:
        """Return the batch of the next step; ``None`` once the steps have ended."""
        batch = next(self._batches, None)
        if batch is not None:
            self._report(batch.step)
        if self._assembly.loader.length is None:
            same_stream(batch)
        self._ended = batch is None
        return batch

    def take(self, batch: StepBatch) -> Metrics:
        """Take the step of ``batch``."""
        self._assembly.step.observer.begins(batch)
        try:
            with self._listener.around(batch.step), self._tells_where_memory_runs_out():
                return self._measured(batch)
        except RollBackError as error:
            raise StepsLostError(str(error)) from None

    def stepped(self) -> None:
        """Record news after a recorded step."""
        self._record_news()

    def settle(self) -> None:
        """Finish pending checks before an evaluation or a checkpoint."""
        step = self._assembly.step
        step.settle()
        if step.drift is not None:
            step.drift.settle()
        if self._ended:
            step.sync.together()
            self._record_news()

    def evaluate(self, interruptions: Interruptions, *, batches: int | None = None) -> Evaluation | None:
        if self._evaluation_data is None:
            return None
        plan, data, leave = self._run.plan, self._evaluation_data, interruptions.stopping
        return evaluate(self._job, plan, self._assembly, data, leave=leave, batches=batches)

    def save(self, folder: Path, *, keep: int, keep_every: int | None) -> Saving | None:
        come_together(self._assembly)
        self._record_news()
        try:
            self._assembly.step.accidents.look_at_values(self.taken, self._assembly.layout.parameters)
        except RollBackError as error:
            raise StepsLostError(str(error)) from None
        if self._assembly.frozen:
            refuse_moved(self._assembly.frozen, frozen_fingerprints(self._assembly))
        if self._assembly.local_sgd and not self._assembly.local_sgd.across.counts:
            return None  # it equals the replica that is saved
        asked = to_save(folder, self._job, self._assembly, keep=keep, keep_every=keep_every)
        saving = self._saver.save(asked, at_once=self._ended)
        self._assembly.step.saved(self.taken)
        return saving

    def awaits_evaluation(self) -> bool:
        scheduler = self._assembly.step.scheduler
        return scheduler is not None and scheduler.awaits_evaluation(self.taken)

    def evaluated(self, value: float) -> None:
        if (scheduler := self._assembly.step.scheduler) is not None:
            scheduler.evaluated(self.taken, value)

    def agreed(self, value: Any) -> Any:
        return self._assembly.from_every_rank(value)[0]

    def recover(self, lost: StepsLostError) -> None:
        """Return to the newest whole checkpoint. Collective.

        Raises:
            CheckpointError: if there is none.
        """
        if self._assembly.step.drift is not None:
            self._assembly.step.drift.settle()  # of the values that are about to be replaced
        with suppress(CheckpointError):  # a failed checkpoint cannot be resumed from
            self._saver.wait()

        def restored(path: Path) -> int:
            restore(path, self._job, self._assembly)
            return self.taken

        path, first, damaged = resume_newest(self._run.folder / CHECKPOINTS, restored)
        self.read_from(first)
        self._recorder.go_back(lambda: _ledger(self._run, self._place, first))
        for message in damaged:
            self._recorder.write("warning", message=message)
        self._recorder.write("resume", step=first, path=str(path.relative_to(self._run.folder)))

    def read_from(self, step: int) -> None:
        """Make ``step`` the next batch to read."""
        self._batches.close()
        loader = self._assembly.loader.starting_at(step)
        self._assembly = replace(self._assembly, loader=loader)
        self._batches, self._ended = iter(loader), False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End background work."""
        self._saver.close()

    def finish(self) -> list[tuple[str, dict[str, Any]]]:
        assembly, found = self._assembly, list[tuple[str, dict[str, Any]]]()
        if kinds := ", ".join(sorted(self._measured.uncounted)):
            found.append(("warning", {"message": f"memory: the tensors of these kinds are not counted: {kinds}"}))
        if (average := assembly.step.average) is not None and not average.updates:
            found.append(
                ("warning", {"message": f"average: none was made in {self.taken} steps; {average.how.begins}"})
            )
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
        for message in self._assembly.step.drift.news() if self._assembly.step.drift else ():
            self._recorder.write("warning", message=message)
        for averaging in replicas.news() if replicas else ():
            self._recorder.write("sync", **asdict(averaging))

    @contextmanager
    def _tells_where_memory_runs_out(self) -> Generator[None]:
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if is_out_of_memory(type(error).__name__, str(error)):
                with suppress(Exception), EventLog(self._run.folder / EVENTS) as log:
                    held = asdict(self._measured.parts())
                    log.write("memory", rank=self._place.rank, peak_bytes=peak_memory(), **held)
            raise


def evaluation_data(job: Job) -> Any:
    """Return the job's evaluation data, equally long on every rank; ``None`` without any. Collective."""
    if job.evaluate is None:
        return None
    data = make_data(job, job.evaluate)
    same_length(len(data) if hasattr(data, "__len__") else None, "job.evaluate")
    return data
