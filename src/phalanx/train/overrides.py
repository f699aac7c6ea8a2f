"""What a run gives in place of the job's own."""

from __future__ import annotations

from dataclasses import replace

from phalanx.config import Job, RunSpec


def apply(job: Job, run: RunSpec) -> Job:
    """``job`` with the batch, steps or epochs that ``run`` states."""
    if run.batch is not None:
        job = replace(job, batch=run.batch)
    if run.steps is not None:
        job = replace(job, steps=run.steps, epochs=None)
    if run.epochs is not None:
        job = replace(job, epochs=run.epochs, steps=None)
    return job
