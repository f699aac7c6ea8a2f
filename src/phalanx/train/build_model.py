"""A job's model and data, made with random numbers from the job's seed only.

The model comes with one device's initial values, without the large ones, or without any.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from phalanx.config import Job
from phalanx.data.sampler import seeded
from phalanx.errors import Problem, SpecError
from phalanx.parallel import Example
from phalanx.parallel.rng_streams import stream
from phalanx.trace.blocks import leave_cache_out
from phalanx.trace.fake_tensors import NothingDrawn
from phalanx.train.phase_jobs import freeze_unowned
from phalanx.units import show_bytes, show_names


def build_model(job: Job, *, deferred: bool = False) -> nn.Module:
    """Build the model with one device's initial values: the same seeds on every rank.

    torch, numpy's global generator and ``random`` are seeded. A model in evaluation mode (as loaded ones are) is put in
    training mode. In a model in training mode, parts in evaluation mode stay so. The cache of keys and values of
    ``transformers``' models is off. ``deferred``: large parameters have recipes in place of values.

    Raises:
        UnrecordedError: if its making cannot be deferred.
        SpecError: if ``job.model`` does not return a model, or ``job.initial`` does not fit it.
    """
    if isinstance(job.model, nn.Module):
        name = type(job.model).__name__
        given, allowed = f"a model, a {name}", "a function that builds it when called: each process builds its own"
        raise SpecError([Problem(where="job.model", given=given, allowed=allowed, fix=f"model=lambda: {name}(...)")])
    seed = stream(job.seed, 0)
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)
    random.seed(seed)
    if deferred:
        from phalanx.parallel.deferred_init import recorded

        module = recorded(job.model)
    else:
        module = job.model()
    if problem := _model_problem(module):
        raise SpecError([problem])
    if job.initial is not None:
        from phalanx.train.pretrained import fill_from

        fill_from(module, job.initial, deferred=deferred)
    freeze_unowned(job, module)
    if not module.training:
        module.train()
    leave_cache_out(module)  # with it some plans would not tell packed documents apart, and others would
    return module


def make_data(job: Job, data: Callable[[], Any]) -> Any:
    """Return the result of ``data``, the job's ``data`` or ``evaluate``; a ``random_split`` in both is the same
    split.
    """
    with seeded(stream(job.seed, 0)):
        return data()


def begun(job: Job) -> tuple[nn.Module, list[str]]:
    """Return the model without values of its large parameters, and a note if it has them all the same."""
    from phalanx.parallel.deferred_init import UnrecordedError, loaded

    try:
        module = build_model(job, deferred=True)
    except UnrecordedError as error:
        return build_model(job), [_WHOLE.format(error)]
    there = loaded(module)
    if 2 * there > sum(tensor.numel() * tensor.itemsize for tensor in module.parameters()):
        return module, [_WHOLE.format(f"job.model gives {show_bytes(there)} of values that it has read or computed")]
    return module, []


def give_needed_values(module: nn.Module, example: Example) -> list[str]:
    """Give ``module`` its values if it cannot be traced without; return a note if so."""
    from phalanx.parallel.deferred_init import fill, followed, recipes

    known = recipes(module)
    if not known or not (why := followed(module, example)):
        return []
    fill(module, known)
    return [_WHOLE.format(why)]


_WHOLE = "the model could not be built piece by piece: {}; every process held it whole at the start."


def _model_problem(module: Any) -> Problem | None:
    def wrong(given: str, allowed: str, fix: str = "model=lambda: Net()") -> Problem:
        return Problem(where="job.model", given=given, allowed=allowed, fix=fix)

    if not isinstance(module, nn.Module):
        return wrong(f"a function that gives {type(module).__name__}", "a function that gives a torch.nn.Module")
    names = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
    kinds = (kind for kind in map(type, module.modules()) if kind.__module__.startswith("torch."))
    wrapped = next((kind for kind in kinds if kind.__name__ in names), None)
    if wrapped is not None:
        allowed = "the model by itself: the plan says how it is spread over devices, and wraps it"
        return wrong(f"a model in {wrapped.__name__}", allowed)
    lazy = [name for name, one in module.named_parameters() if isinstance(one, UninitializedParameter)]
    if lazy:
        return wrong(
            f"parameters that have no shape before the first batch: {show_names(lazy)}",
            "layers of given sizes, so that every plan knows what it has to place before anything runs",
            "nn.Linear(64, 10) in place of nn.LazyLinear(10); or call the model once on a sample within job.model",
        )
    if type(module).__name__ == "OptimizedModule":
        allowed = "the model by itself: the plan says whether it is compiled"
        return wrong("a model in torch.compile", allowed, "model=lambda: Net(), and compile=true in the plan")
    halves = sorted({str(one.dtype) for one in module.parameters() if one.requires_grad and one.itemsize < 4})
    if halves:
        half = " and ".join(name.removeprefix("torch.") for name in halves)
        return wrong(
            f"a model with trainable parameters in {half}: steps smaller than 1/256 of a value would be rounded away",
            "trainable parameters in float32 (frozen ones in any); the plan's precision says what is computed in",
            "model=lambda: Net().float(), and precision=bf16 in the plan",
        )
    if not any(tensor.requires_grad for tensor in module.parameters()):
        allowed = "a model with at least one parameter that requires a gradient"
        fix = "for p in model.parameters(): p.requires_grad_(True)"
        return wrong("a model without trainable parameters", allowed, fix)
    return None


_LARGE = 2e8  # elements: some seconds of random numbers


def without_values(job: Job, size: int | None = None) -> Job:
    """Return ``job`` with a model without values, if drawing them would take long and can be skipped.

    ``size`` is the model's, if known.
    """
    size = size_of(job) if size is None else size
    return replace(job, model=lambda: _on_meta(job), initial=None) if (size or 0) > _LARGE else job


def size_of(job: Job) -> int | None:
    """Return the elements of the model's parameters, without making them; ``None`` if that fails."""
    try:
        return sum(tensor.numel() for tensor in _on_meta(job).parameters())
    except Exception:  # some models need values
        return None


def _on_meta(job: Job) -> nn.Module:
    with torch.device("meta"), NothingDrawn():
        return job.model()
