"""Jobs that are another one without a part of what it asks for."""

from __future__ import annotations

from dataclasses import replace

from phalanx.config.job import Job


def without_evaluation(job: Job) -> Job:
    """``job``, which then evaluates nothing and looks for no best evaluation."""
    return replace(job, evaluate=None, metrics=None, evaluate_every=0, best=None)
