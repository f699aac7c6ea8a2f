"""Jobs that are another one without its evaluation, or without batches that change."""

from __future__ import annotations

from dataclasses import replace

from phalanx.config.job import Job


def without_evaluation(job: Job) -> Job:
    """``job``, which then evaluates nothing and looks for no best evaluation."""
    return replace(job, evaluate=None, metrics=None, evaluate_every=0, best=None)


def in_even_batches(job: Job, most: int | None = None) -> Job:
    """``job``, with ``job.batch`` samples in every global batch, or with ``most`` where those are fewer."""
    return replace(job, batch=min(job.batch, most or job.batch), batch_ramp=None, batch_tokens=None)
