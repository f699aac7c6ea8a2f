"""The records of a run: its events, and the ledger of the samples in each step."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from phalanx.checkpoint.best import BEST, BestSoFar
from phalanx.config import Job, RunSpec
from phalanx.config.run_files import EVENTS, RUN_TOML
from phalanx.data import Ledger, StepBatch
from phalanx.errors import RunError
from phalanx.events import SCHEMA_VERSION, EventLog
from phalanx.files import check_writer, replace_text
from phalanx.placement.survey_file import PLACEMENT
from phalanx.train.metrics import Metrics

if TYPE_CHECKING:
    from phalanx.checkpoint.mirror import Mirror

Lap = tuple[float, float]
"""Seconds of the host for forward and backward of a step, and for its update."""

_LAPS, _WARM_UP = 1000, 3  # steps timed, and those at their beginning that do not count
_TAIL = 1 << 18  # bytes of the log in which a step's event is looked for


@final
class RunRecorder:
    """A writer of the ledger in a process with samples, and of the events in one process of the run."""

    def __init__(
        self, run: RunSpec, *, ledger: Ledger | None, writes: bool, total_steps: int | None, late: bool = False
    ) -> None:
        """Open the records; ``writes``: this process writes events.

        ``late``: a step's numbers are read when the next is queued. On CUDA the device is busy with it during the wait.
        """
        self._run, self._ledger, self._total, self._late = run, ledger, total_steps, late
        self._log = EventLog(run.folder / EVENTS) if writes else None
        self._mirror = _mirror(run) if writes else None
        self._waiting: tuple[Metrics, float, float | None] | None = None
        self._unwritten: tuple[Metrics, float, float | None] | None = None
        self._laps: deque[Lap] = deque(maxlen=_LAPS)
        self._first = self._last = time.perf_counter()

    def __enter__(self) -> RunRecorder:
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            if self._ledger:
                self._ledger.__exit__(*error)
        finally:
            if self._mirror:  # a run that failed still copies what it had saved; ``finish`` has said what became of it
                with suppress(RunError):
                    self._mirror.close()
                self._write_copied()
            if self._log:
                self._log.close()

    def write(self, event: str, **fields: Any) -> None:
        """Append one event."""
        if self._log:
            self._log.write(event, **fields)

    def start(
        self,
        job: Job,
        *,
        advice: Iterable[str],
        resumed: Path | None,
        placement: Mapping[str, Any] | None,
        **facts: Any,
    ) -> None:
        """Write the settings, once all checks have passed, and the first events.

        ``facts`` are the fields of ``start`` that only the assembled run knows. ``advice`` becomes warnings,
        ``resumed`` is the checkpoint to resume from, and ``placement`` each rank's part, as JSON.

        Raises:
            RunError: if the settings cannot be written, or another run has taken over the folder.
        """
        plan = self._run.plan
        if self._log:
            self._write_settings(placement)
        self.write(
            "start",
            schema=SCHEMA_VERSION,
            job=job.name,
            plan=str(plan),
            exact=plan.exactness,
            batch=job.batch,
            batch_tokens=None if job.batch_tokens is None else job.batch_tokens.tokens,
            whole_epochs=job.steps is None,
            drop_last=job.drop_last,
            total_steps=self._total,
            workers=job.workers,
            **facts,
        )
        for message in advice:
            self.write("warning", message=message)
        if resumed:
            self.write("resume", step=facts["first_step"], path=str(resumed.relative_to(self._run.folder)))
            self.copy(resumed)  # its writer may have ended before it was copied

    def begin(self) -> None:
        """Start the clock of the first step."""
        self._first = self._last = time.perf_counter()

    def _write_settings(self, placement: Mapping[str, Any] | None) -> None:
        folder = self._run.folder
        check_writer(folder)
        try:
            replace_text(folder / "plan.toml", self._run.plan.to_toml())
            if placement:
                replace_text(folder / PLACEMENT, json.dumps(placement) + "\n")
            else:
                (folder / PLACEMENT).unlink(missing_ok=True)  # an earlier part's, under another plan
            replace_text(folder / RUN_TOML, replace(self._run, folder=folder.absolute()).to_toml())
        except OSError as error:
            what = f"the run folder {folder} cannot be written: {error.strerror}"
            raise RunError(f"{what}\n    try: free space there, or another folder") from error

    def stepped(self, batch: StepBatch, metrics: Metrics, lap: Lap | None) -> None:
        """Record one step; ``lap`` is ``None`` if no single process takes it."""
        if self._ledger:
            self._ledger.record(batch, left_out=bool(metrics.accident))
        if not self._log:
            return
        if lap:
            self._laps.append(lap)
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._write_waiting()
        due = self._due(metrics)
        self._unwritten = None if due else (metrics, seconds, batch.waited)
        if due and self._late:
            self._waiting = metrics, seconds, batch.waited
        elif due:
            self._write_step(metrics, seconds, batch.waited)

    def note_best(self, best: BestSoFar) -> None:
        """Write the best evaluation into the run's folder, for readers and for the deletion of checkpoints.

        Raises:
            RunError: it cannot be written.
        """
        if not self._log:
            return
        try:
            best.write(self._run.folder)
        except OSError as error:
            what = f"{self._run.folder / BEST} cannot be written: {error.strerror}"
            raise RunError(f"{what}\n    try: free space there") from error

    def go_back(self, segment: Callable[[], Ledger | None]) -> None:
        """Record repeated steps in a new segment of the ledger."""
        if self._ledger:
            self._ledger.close()  # before the new one, which may be the same file: what is buffered must not follow it
        self._write_waiting()
        self._unwritten = None
        self._ledger = segment()

    def copy(self, checkpoint: Path) -> None:
        """Queue a whole checkpoint to be copied to the run's ``mirror``, if it has one, during training."""
        if self._mirror:
            self._mirror.add(checkpoint)

    def flush(self) -> None:
        """Bring all records to disk."""
        if self._ledger:
            self._ledger.flush()
        self._write_waiting()
        self._write_copied()

    def finish(
        self,
        events: Sequence[tuple[str, dict[str, Any]]],
        *,
        step: int,
        samples: int,
        loss: float | None,
        stopped: str = "",
    ) -> dict[str, Any]:
        """Write the last events: the last step, how long steps took, ``events``, and the summary; return the summary.

        ``stopped``: the name of the signal that ended the run, which then is not over.

        Raises:
            CheckpointError: the last checkpoint could not be copied to the run's ``mirror``.
        """
        if self._mirror and not stopped:
            self._mirror.close()
        self.flush()
        if self._unwritten:
            self._write_step(*self._unwritten)
        if self._laps and not self._late:  # on CUDA the host has only queued what the device then does
            warm = list(self._laps)[_WARM_UP:] or list(self._laps)
            passes, update = (statistics.median(each) for each in zip(*warm, strict=True))
            self.write("timing", passes=passes, update=update)
        for event, fields in events:
            self.write(event, **fields)
        summary = {"step": step, "samples": samples, "seconds": self._last - self._first, "loss": loss}
        if stopped:
            self.write("stopped", step=step, signal=stopped)  # before what may take longer than there is time for
            if self._mirror:
                self._mirror.close()
                self._write_copied()
        else:
            self.write("end", **summary)
        return summary

    def _write_copied(self) -> None:
        for told in self._mirror.news() if self._mirror else ():
            relative = str(Path(told["path"]).relative_to(self._run.folder))
            if "error" in told:
                self.write("warning", message=f"{relative} was not copied: {told['error']}")
            else:
                self.write("copied", path=relative, url=self._run.mirror, bytes=told["bytes"])

    def _write_waiting(self) -> None:
        if self._waiting:
            self._write_step(*self._waiting)
            self._waiting = None

    def complete(self, metrics: Metrics, seconds: float) -> None:
        """Append the event of the last finished step if it is due and missing: its writer may be gone."""
        if not self._due(metrics) or _has_step(self._run.folder / EVENTS, metrics.step):
            return
        if self._log:
            self._write_step(metrics, seconds)
            return
        with EventLog(self._run.folder / EVENTS) as self._log:
            self._write_step(metrics, seconds)
        self._log = None

    def _due(self, metrics: Metrics) -> bool:
        return metrics.step % self._run.log_every == 0 or metrics.step + 1 == self._total

    def _write_step(self, metrics: Metrics, seconds: float, waited: float | None = None) -> None:
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
            waited=waited,
            losses=metrics.losses,
        )


def _has_step(log: Path, step: int) -> bool:
    found = False
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
        for line in file:
            with suppress(ValueError, KeyError, TypeError):
                event = json.loads(line)
                found = event["event"] != "start" and (found or (event["event"], event.get("step")) == ("step", step))
    return found


def _mirror(run: RunSpec) -> Mirror | None:
    if run.mirror is None:
        return None
    from phalanx.checkpoint.mirror import Mirror

    return Mirror(run.mirror, keep=run.keep, keep_every=run.keep_every or 0)
