"""An evaluation of a model that a run has stored, in this process: on its job's evaluation data or on others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from phalanx.comm import Place, device_for
from phalanx.config import Job, Plan
from phalanx.config.job_parts import in_even_batches
from phalanx.data.dataset_facts import MapStyle
from phalanx.data.sampler import seeded
from phalanx.errors import SpecError
from phalanx.parallel import device_kind, devices_here
from phalanx.parallel.rng_streams import stream
from phalanx.train.assembly import build, refuse
from phalanx.train.evaluate import Evaluation, evaluate
from phalanx.train.findings import Findings
from phalanx.train.frozen_values import completed
from phalanx.train.trained_model import with_values


def evaluate_stored(job: Job, plan: Plan, values: Mapping[str, torch.Tensor], path: Path, data: Any) -> Evaluation:
    """Evaluate ``job``'s model with ``values`` of the checkpoint ``path`` on ``data``; under ``plan``, of one process.

    ``data`` is a dataset or a function that gives one; ``None``: what the job evaluates on. Random numbers of the
    process are left as they were.

    Raises:
        SpecError: there is nothing to evaluate on, it cannot be read, or the values are another model's.
        RefusedError: the plan cannot serve the job here.
        LossError: the loss or a metric is of a wrong form.
    """
    source = job.evaluate if data is None else data
    if source is None:
        allowed = "data to evaluate on, of the job or given here"
        raise SpecError.of("data", "None, for a job without evaluation data", allowed, 'run.evaluate(Digits("test"))')
    with torch.random.fork_rng(), seeded(stream(job.seed, 0)):
        gives = isinstance(source, type) or not hasattr(source, "__getitem__")
        held_out = source() if gives and callable(source) else source
        # the training data are not asked for, and values come from the checkpoint
        course: dict[str, Any] = {
            "data": lambda: held_out,
            "sampler": held_out.sampler if isinstance(held_out, MapStyle) else None,
            "shuffle": None,
            "drop_last": False,
        }
        alone = replace(
            in_even_batches(job), **course, steps=1, epochs=None, evaluate=lambda: held_out, initial=None, average=None
        )
        here = devices_here(plan, Place())
        refuse(alone, plan, 1, here)
        assembly = build(
            alone, plan, Place(), device_for(Place(), device_kind(plan, here)), findings=Findings(looked=True)
        )
        with_values(assembly.layout.module, completed(job, path, dict(values)), str(path))
        found = evaluate(alone, plan, assembly, held_out)
    assert found  # nobody asks it to leave off
    return found
