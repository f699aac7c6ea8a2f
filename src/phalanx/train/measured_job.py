"""A job as it is measured: so many steps and nothing beside them."""

from __future__ import annotations

from dataclasses import replace

from phalanx.config import Job
from phalanx.config.job_parts import in_even_batches, without_evaluation
from phalanx.train.torch_scheduler import without_plateau


def steps_alone(job: Job, steps: int) -> Job:
    """``job`` with so many steps of its largest batch, which evaluates nothing and calls nothing back."""
    job = replace(in_even_batches(without_evaluation(job)), steps=steps, epochs=None, callbacks={})
    if job.phases:
        return replace(job, phases=[replace(one, optimizer=without_plateau(one.optimizer)) for one in job.phases])
    return replace(job, optimizer=without_plateau(job.optimizer))
