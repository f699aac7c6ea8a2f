"""The training loop of one worker: steps, evaluations, checkpoints, events."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from phalanx.comm import Place, device_for, joined, place_within, within
from phalanx.config import Job, RunSpec
from phalanx.data import Ledger, StepBatch
from phalanx.errors import CheckpointError
from phalanx.events import SCHEMA_VERSION, EventLog
from phalanx.hardware import peak_memory
from phalanx.parallel import device_kind
from phalanx.train.assembly import Assembly, build, refuse
from phalanx.train.consistency import same_length, same_stream
from phalanx.train.evaluate import evaluate
from phalanx.train.lr_schedule import resume_notes
from phalanx.train.memory import Measured, Parts
from phalanx.train.metrics import Metrics
from phalanx.train.observer import AssemblyScene, Observer
from phalanx.train.state import come_together, restore, save, traffic
from phalanx.train.timeline import Listener, only_step
from phalanx.train.uneven_shares import Sharing

_LAPS, _WARM_UP = 1000, 3  # steps timed, and those at their beginning that do not count


def train(
    job: Job,
    run: RunSpec,
    place: Place,
    *,
    report: Callable[[int], None],
    observer: Observer | None = None,
    causes: Sequence[str] = (),
) -> dict[str, Any]:
    """Run the whole training on this worker; ``report(step)`` is called as each step begins.

    ``observer`` looks on; every run goes the same way, with and without one. ``causes`` of a difference from one
    device, found before the run, stand among its notes.

    Returns a summary: steps taken, last loss, last evaluation.
    """
    observer = observer or Observer()
    if run.plan.server:
        from phalanx.train.parameter_server import take_part

        return take_part(job, run, place, report, observer=observer)
    here = place.workers_here * run.plan.threads
    refuse(job, run.plan, place.world_size, here)
    with joined(place_within(run.plan, place), device_for(place, device_kind(run.plan, here))):
        path, first_step = _where_to_resume(run) if run.resume else (None, 0)
        assembly = build(job, run.plan, place, first_step=first_step, lr_scale=run.lr_scale)
        assembly.notes.extend(causes)
        if path:
            restore(path, job, assembly)
            total = assembly.loader.total_steps
            assembly.notes.extend(resume_notes(job, run.folder, step=first_step, total_steps=total))
        assembly.step.observer = observer
        observer.built(AssemblyScene(assembly))
        with _Recorder(job, run, place, assembly, path) as recorder:
            return _Loop(job, run, assembly, recorder).run(report)


class _Loop:
    """Steps with what happens between them."""

    def __init__(self, job: Job, run: RunSpec, assembly: Assembly, recorder: _Recorder) -> None:
        self._job, self._run, self._assembly, self._recorder = job, run, assembly, recorder
        self._observer = assembly.step.observer
        self._evaluation_data = _evaluation_data(job)
        self._measured = Measured(assembly.step, assembly.device)
        only = only_step(assembly.device, assembly.step.progress.step, assembly.loader.total_steps)
        rank = recorder.rank if assembly.apart is None else assembly.apart.across.rank
        self._listener = Listener(assembly.layout.held, within(run.plan), rank, only)
        self._saved_at = assembly.step.progress.step
        self._evaluated_at = -1
        self._last_evaluation: dict[str, Any] = {}

    def run(self, report: Callable[[int], None]) -> dict[str, Any]:
        step = self._assembly.step
        job, run, recorder, observer = self._job, self._run, self._recorder, self._observer
        metrics: Metrics | None = None
        for batch in self._assembly.loader:
            report(batch.step)
            if self._assembly.loader.length is None:
                same_stream(batch)
            observer.begins(batch)
            with self._listener.around(batch.step), self._tells_where_memory_runs_out():
                metrics = self._measured(batch)
            observer.updated(batch, metrics)
            recorder.stepped(batch, metrics, step.seconds)
            recorder.shares(step.sharing)
            recorder.averaged(self._assembly)
            if job.evaluate_every and step.progress.step % job.evaluate_every == 0:
                self._evaluate()
            if run.checkpoint_every and step.progress.step % run.checkpoint_every == 0:
                self._save()
        if self._assembly.loader.length is None:
            same_stream(None)
        step.settle()
        step.sync.together()
        recorder.averaged(self._assembly)
        recorder.flush()
        if self._evaluated_at != step.progress.step:
            self._evaluate()
        if self._saved_at != step.progress.step:
            self._save()
        observer.ended()
        if kinds := ", ".join(sorted(self._measured.uncounted)):
            recorder.write("warning", message=f"memory: the tensors of these kinds are not counted: {kinds}")
        across = self._assembly.apart.across if self._assembly.apart else None
        for event in self._listener.events():
            recorder.write("timeline", **event | ({"rank": across.named(event["rank"])} if across else {}))
        for event in traffic(self._assembly.layout.held):
            recorder.write("traffic", **event)
        return recorder.finish(metrics, self._last_evaluation, self._measured.parts())

    @contextmanager
    def _tells_where_memory_runs_out(self) -> Generator[None]:
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error):
                with suppress(Exception), EventLog(self._run.folder / "events.jsonl") as log:
                    held = self._measured.parts().to_dict()
                    log.write("memory", rank=self._recorder.rank, peak_bytes=peak_memory(), **held)
            raise

    def _evaluate(self) -> None:
        if self._evaluation_data is None:
            return
        self._recorder.flush()
        result = evaluate(self._job, self._run.plan, self._assembly, self._evaluation_data)
        self._evaluated_at = self._assembly.step.progress.step
        self._last_evaluation = {"loss": result.loss, "samples": result.samples, "metrics": result.metrics}
        self._observer.evaluated(self._evaluated_at, self._last_evaluation)
        self._recorder.write("evaluate", step=self._evaluated_at, seconds=result.seconds, **self._last_evaluation)

    def _save(self) -> None:
        begun = time.perf_counter()
        self._assembly.step.settle()  # no checkpoint of a loss that is not a number
        self._recorder.flush()
        step = self._assembly.step.progress.step
        come_together(self._assembly)
        self._recorder.averaged(self._assembly)
        if self._assembly.apart and not self._assembly.apart.across.counts:
            self._saved_at = step
            return
        path = save(self._run.folder / "checkpoints", self._job, self._assembly, keep=self._run.keep)
        self._saved_at = step
        self._observer.saved(step, path)
        size = sum(file.stat().st_size for file in path.iterdir())
        relative = str(path.relative_to(self._run.folder))
        self._recorder.write("checkpoint", step=step, path=relative, bytes=size, seconds=time.perf_counter() - begun)


def _evaluation_data(job: Job) -> Any:
    if job.evaluate is None:
        return None
    data = job.evaluate()
    same_length(len(data) if hasattr(data, "__len__") else None, "job.evaluate")
    return data


class _Recorder:
    """Writes the ledger on every rank with samples of its own and the event log on rank 0."""

    def __init__(self, job: Job, run: RunSpec, place: Place, assembly: Assembly, resumed: Path | None) -> None:
        self.rank = place.rank
        self._every = run.log_every
        self._total = assembly.loader.total_steps
        first = assembly.step.progress.step
        self._ledger = _ledger(run, place, first)
        self._log = EventLog(run.folder / "events.jsonl") if place.rank == 0 else None
        # On CUDA a loss is read when the next step is queued: the device is busy with that while it is waited for.
        self._late = assembly.device == "cuda"
        self._waiting: tuple[Metrics, float] | None = None
        self._unwritten: tuple[Metrics, float] | None = None
        self._laps: deque[tuple[float, float]] = deque(maxlen=_LAPS)
        self._first = self._last = time.perf_counter()
        self._samples_before = assembly.step.progress.samples
        self._progress = assembly.step.progress
        self._everyone = assembly.from_every_rank
        self.write(
            "start",
            schema=SCHEMA_VERSION,
            job=job.name,
            plan=str(run.plan),
            exact=run.plan.exactness,
            world_size=place.world_size,
            device=assembly.device,
            batch=job.batch,
            samples=assembly.loader.length,
            drop_last=job.drop_last,
            total_steps=self._total,
            first_step=assembly.step.progress.step,
            parameters=assembly.parameters,
            notes=assembly.notes,
        )
        self.shares(assembly.step.sharing)
        for message in assembly.advice:
            self.write("warning", message=message)
        if resumed:
            self.write("resume", step=self._progress.step, path=str(resumed.relative_to(run.folder)))

    def __enter__(self) -> _Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._ledger:
            self._ledger.close()
        if self._log:
            self._log.close()

    def write(self, event: str, **fields: Any) -> None:
        if self._log:
            self._log.write(event, **fields)

    def stepped(self, batch: StepBatch, metrics: Metrics, lap: tuple[float, float]) -> None:
        """Record one step, with the seconds of its forward and backward and of its update."""
        if self._ledger:
            self._ledger.record(batch)
        if not self._log:
            return
        self._laps.append(lap)
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        if self._waiting:
            self._write_step(*self._waiting)
            self._waiting = None
        due = metrics.step % self._every == 0 or metrics.step + 1 == self._total
        if not due:
            self._unwritten = (metrics, seconds)
        elif self._late:
            self._waiting = (metrics, seconds)
        else:
            self._write_step(metrics, seconds)

    def shares(self, sharing: Sharing | None) -> None:
        """Record what has changed in the ranks' shares."""
        for shift in sharing.news() if sharing else ():
            self.write("shares", **shift.to_dict())

    def averaged(self, assembly: Assembly) -> None:
        """Record the averagings since the last time."""
        for news in assembly.apart.told() if assembly.apart else ():
            self.write("sync", **asdict(news))

    def flush(self) -> None:
        """Bring everything recorded so far to disk."""
        if self._ledger:
            self._ledger.flush()
        if self._waiting:
            self._write_step(*self._waiting)
            self._waiting = None

    def finish(self, metrics: Metrics | None, evaluation: dict[str, Any], parts: Parts) -> dict[str, Any]:
        """Write the last events. Collective. Returns the run's summary."""
        self.flush()
        if self._unwritten and metrics is self._unwritten[0]:
            self._write_step(*self._unwritten)
        seconds = self._last - self._first
        if self._laps and not self._late:  # on CUDA the host has only queued what the device then does
            warm = list(self._laps)[_WARM_UP:] or list(self._laps)
            passes, update = (statistics.median(each) for each in zip(*warm, strict=True))
            self.write("timing", passes=passes, update=update)
        for rank, held in enumerate(self._everyone({"peak_bytes": peak_memory(), **parts.to_dict()})):
            self.write("memory", rank=rank, **held)
        summary = {
            "step": self._progress.step,
            "samples": self._progress.samples - self._samples_before,
            "seconds": seconds,
            "loss": metrics.loss if metrics else None,
        }
        self.write("end", **summary)
        return {**summary, "evaluation": evaluation}

    def _write_step(self, metrics: Metrics, seconds: float) -> None:
        self.write(
            "step",
            step=metrics.step,
            epoch=metrics.epoch,
            loss=metrics.loss,
            count=metrics.count,
            samples=metrics.samples,
            seconds=seconds,
            lr=metrics.lr,
            grad_norm=metrics.grad_norm,
            skipped=metrics.skipped,
        )


def _ledger(run: RunSpec, place: Place, first_step: int) -> Ledger | None:
    """The ledger of this rank's samples; none where it shares them with ranks before it, which hold other slices."""
    plan = run.plan
    at = plan.coordinate(place.rank)
    if at["pp"] or at["cp"] or at["tp"]:
        return None
    readers = plan.replicas // plan.threads
    return Ledger(
        run.folder / "ledger", rank=plan.part(place.rank) // plan.threads, first_step=first_step, world_size=readers
    )


def _where_to_resume(run: RunSpec) -> tuple[Path, int]:
    from phalanx import checkpoint

    folder = run.folder / "checkpoints"
    path = checkpoint.latest(folder)
    if path is None:
        raise CheckpointError(
            f"{folder} holds no complete checkpoint to resume from\n    try: without --resume, a new run"
        )
    return path, checkpoint.read_state(path)["step"]
