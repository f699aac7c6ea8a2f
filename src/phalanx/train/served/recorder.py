"""The event log and the ledger of a run with servers, which server 0 writes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, final

from phalanx.config import RunSpec
from phalanx.data import Ledger, MicroBatch, StepBatch
from phalanx.data.loader import Pieces
from phalanx.events import EventLog, read
from phalanx.parallel.server import Report
from phalanx.train.metrics import Metrics


@final
class Recorder:
    """Writes what happens; one thread uses it."""

    def __init__(self, run: RunSpec, pieces: Pieces, first: int) -> None:
        self._run, self._pieces = run, pieces
        self._log = EventLog(run.folder / "events.jsonl")
        self._ledger = self._segment(first)
        self._begun = self._last = time.perf_counter()
        self._unwritten: dict[str, Any] | None = None

    def close(self) -> None:
        """Bring everything to disk."""
        self._ledger.close()
        self._log.close()

    def flush(self) -> None:
        """Bring the ledger to disk."""
        self._ledger.flush()

    def write(self, event: str, **fields: Any) -> None:
        """One event."""
        self._log.write(event, **fields)

    def updated(self, metrics: Metrics, version: int, reports: Mapping[int, Report], dropped: int) -> None:
        """One update: its ``step``, where its gradients came from, and its samples in the ledger."""
        self._record(metrics.step, list(reports))
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        fields = {
            "step": metrics.step,
            "epoch": metrics.epoch,
            "loss": metrics.loss,
            "count": metrics.count,
            "samples": metrics.samples,
            "seconds": seconds,
            "lr": metrics.lr,
            "grad_norm": metrics.grad_norm,
            "skipped": False,
        }
        due = metrics.step % self._run.log_every == 0 or metrics.step + 1 == self._pieces.total_steps
        self._unwritten = None if due else fields
        if due:
            self.write("step", **fields)
        self.write(
            "update",
            step=metrics.step,
            version=version,
            staleness=[version - 1 - report.version for report in reports.values()],
            workers=[report.worker for report in reports.values()],
            dropped=dropped,
        )

    def go_back(self, first: int, done: list[int]) -> None:
        """From ``first`` on steps are taken anew, but for those in ``done``."""
        self._ledger.close()
        self._ledger = self._segment(first)
        for step in done:
            sizes = self._pieces.sizes(step)
            self._record(step, [part for part, size in enumerate(sizes) if size])

    @property
    def seconds(self) -> float:
        """Since it began, to the last update."""
        return self._last - self._begun

    def last(self) -> None:
        """The last update, if its step was not due to be written."""
        if self._unwritten:
            self.write("step", **self._unwritten)

    def _record(self, step: int, parts: list[int]) -> None:
        self._ledger.record(batch_of(self._pieces, step, parts))

    def _segment(self, first: int) -> Ledger:
        return Ledger(self._run.folder / "ledger", rank=0, first_step=first, world_size=1)


def batch_of(pieces: Pieces, step: int, parts: list[int]) -> StepBatch:
    """The samples of a step's ``parts``; the batches themselves are with the workers."""
    micros = tuple(
        MicroBatch(batch=None, ids=tuple(ids.tolist()), samples=len(ids))
        for ids in (pieces.ids(step, part) for part in parts)
    )
    samples = sum(micro.samples for micro in micros)
    return StepBatch(step=step, epoch=pieces.epoch(step), samples=samples, parts=(micros,))


def last_version(run: RunSpec) -> int:
    """Updates that the run in this folder has made since it last began, as its events tell."""
    version = 0
    for event in read(run.folder / "events.jsonl"):
        if event["event"] == "start":
            version = int(event["first_step"])
        elif event["event"] in ("update", "server"):
            version = int(event["version"])
    return version
