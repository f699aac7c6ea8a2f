"""A trained model as the user wrote it: built by its job, with the values of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.comm import Place, device_for
from phalanx.config import Job, Plan
from phalanx.data.dataset_facts import MapStyle
from phalanx.data.sampler import seeded
from phalanx.errors import SpecError
from phalanx.parallel import device_kind, devices_here
from phalanx.parallel.rng_streams import stream
from phalanx.train.assembly import build, refuse
from phalanx.train.evaluate import Evaluation, evaluate
from phalanx.train.findings import Findings
from phalanx.train.frozen_values import completed
from phalanx.train.phase_jobs import in_even_batches
from phalanx.units import show_names


def trained_model(job: Job, values: Mapping[str, Tensor], where: str) -> nn.Module:
    """Return the job's model with ``values``, in evaluation mode; tied tensors need one name among them.

    Args:
        values: by name; whole.
        where: their origin, for the error.

    Raises:
        SpecError: names or shapes are another model's.
    """
    with torch.random.fork_rng(devices=[]):
        module: Any = job.model()
    if not isinstance(module, nn.Module):
        raise SpecError.of("job.model", f"a {type(module).__name__}", "a torch.nn.Module", "model=lambda: Net()")
    return with_values(module, values, where).eval()


def with_values(module: nn.Module, values: Mapping[str, Tensor], where: str) -> nn.Module:
    """Return ``module`` with ``values``, which come from ``where``; tied tensors need one name among them.

    Raises:
        SpecError: names or shapes are another model's.
    """
    own = {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    names = {id(tensor): name for name, tensor in own.items() if name in values}
    problems = {
        "missing there": [name for name, tensor in own.items() if id(tensor) not in names],
        "only there": [name for name in values if name not in own],
        "other shape": [
            f"{name} {list(own[name].shape)} here, {list(value.shape)} there"
            for name, value in values.items()
            if name in own and own[name].shape != value.shape
        ],
    }
    if said := [f"{what} ({len(found)}): {show_names(sorted(found), 10)}" for what, found in problems.items() if found]:
        given = f"a model that {where} does not fit: {'; '.join(said)}"
        raise SpecError.of("job.model", given, "the model that the run has trained", "the job as it was in the run")
    bare = any(tensor.is_meta for tensor in own.values())
    module.load_state_dict({name: values[names[id(tensor)]] for name, tensor in own.items()}, strict=False, assign=bare)
    return module


def evaluate_stored(job: Job, plan: Plan, values: Mapping[str, torch.Tensor], path: Path, data: Any) -> Evaluation:
    """Evaluate ``job``'s model with ``values`` of the checkpoint ``path`` on ``data``, in this process.

    ``data`` is a dataset or a function that returns one; ``None``: the job's evaluation data. The process's random
    states are restored.

    Raises:
        SpecError: there are no data, they cannot be read, or the values are another model's.
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
    assert found  # it is never asked to stop
    return found
