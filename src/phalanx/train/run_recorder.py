"""What a run writes as it goes: its events, and the ledger of the samples in each step."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, final

from phalanx.config import Job, RunSpec
from phalanx.data import Ledger, StepBatch
from phalanx.events import SCHEMA_VERSION, EventLog
from phalanx.train.metrics import Metrics

Lap = tuple[float, float]
"""Seconds of the host for forward and backward of a step, and for its update."""

_LAPS, _WARM_UP = 1000, 3  # steps timed, and those at their beginning that do not count


@final
class RunRecorder:
    """Writes the ledger of a process that has samples of its own, and in one process of the run the events."""

    def __init__(
        self, run: RunSpec, *, ledger: Ledger | None, writes: bool, total_steps: int | None, late: bool = False
    ) -> None:
        """``writes``: it is this process that writes events.

        ``late``: a step's numbers are read when the next is queued; on CUDA the device is busy with that while they are
        waited for.
        """
        self._run, self._ledger, self._total, self._late = run, ledger, total_steps, late
        self._log = EventLog(run.folder / "events.jsonl") if writes else None
        self._waiting: tuple[Metrics, float] | None = None
        self._unwritten: tuple[Metrics, float] | None = None
        self._laps: deque[Lap] = deque(maxlen=_LAPS)
        self._first = self._last = time.perf_counter()

    def __enter__(self) -> RunRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._ledger:
            self._ledger.close()
        if self._log:
            self._log.close()

    def write(self, event: str, **fields: Any) -> None:
        """Append one event."""
        if self._log:
            self._log.write(event, **fields)

    def start(self, job: Job, *, advice: Iterable[str], resumed: Path | None, **facts: Any) -> None:
        """Write the first events.

        ``facts`` are the fields of ``start`` that only the assembled run knows; ``advice`` becomes warnings, and
        ``resumed`` is the checkpoint that the run goes on from.
        """
        plan = self._run.plan
        self.write(
            "start",
            schema=SCHEMA_VERSION,
            job=job.name,
            plan=str(plan),
            exact=plan.exactness,
            batch=job.batch,
            drop_last=job.drop_last,
            total_steps=self._total,
            **facts,
        )
        for message in advice:
            self.write("warning", message=message)
        if resumed:
            self.write("resume", step=facts["first_step"], path=str(resumed.relative_to(self._run.folder)))

    def stepped(self, batch: StepBatch, metrics: Metrics, lap: Lap | None) -> None:
        """Record one step; ``lap`` is ``None`` where no one process takes it."""
        if self._ledger:
            self._ledger.record(batch)
        if not self._log:
            return
        if lap:
            self._laps.append(lap)
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._write_waiting()
        due = metrics.step % self._run.log_every == 0 or metrics.step + 1 == self._total
        self._unwritten = None if due else (metrics, seconds)
        if due and self._late:
            self._waiting = metrics, seconds
        elif due:
            self._write_step(metrics, seconds)

    def go_back(self, segment: Callable[[], Ledger], done: Iterable[StepBatch]) -> None:
        """Steps are taken anew, and noted in a new segment of the ledger, which begins with those that are ``done``."""
        if self._ledger:
            self._ledger.close()  # before the new one, which may be the same file: what is buffered must not follow it
        self._ledger = segment()
        for batch in done:
            self._ledger.record(batch)

    def flush(self) -> None:
        """Bring everything recorded so far to disk."""
        if self._ledger:
            self._ledger.flush()
        self._write_waiting()

    def finish(
        self, events: Sequence[tuple[str, dict[str, Any]]], *, step: int, samples: int, loss: float | None
    ) -> dict[str, Any]:
        """Write the last events: the last step, how long steps took, ``events``, and the summary, which is returned."""
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
        self.write("end", **summary)
        return summary

    def _write_waiting(self) -> None:
        if self._waiting:
            self._write_step(*self._waiting)
            self._waiting = None

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
