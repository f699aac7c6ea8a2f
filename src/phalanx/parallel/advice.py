"""Warnings before a run: settings that waste devices, or that give other results than one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from phalanx.config import Job, Plan
from phalanx.config.sync import AUTO
from phalanx.device_kinds import on_host
from phalanx.errors import GradientError
from phalanx.parallel.buffer_sync import statistics_of
from phalanx.placement.batch_split import largest_even, micro_batches
from phalanx.placement.limits import unread
from phalanx.placement.schedules import bubble, order
from phalanx.units import show_names

_ENOUGH = 4  # micro-batches a rank, from which on at most about a fifth of the time is bubble


def advice(job: Job, plan: Plan, kind: str, epoch_samples: int | None = None) -> list[str]:
    """Return a sentence for each setting that leaves ranks idle, or has no effect, on devices of ``kind``.

    An epoch has ``epoch_samples``; ``None``: unknown.
    """
    found = [*_bubble(job, plan), *unread(plan, job.batch, job.tensor_parallel)]
    if plan.offload != "none" and on_host(kind):
        found.append(f"offload={plan.offload} moves nothing: on CPU cores all of it lives in host memory.")
    if epoch_samples is not None and job.batch > epoch_samples and job.batch_tokens is None:
        found.append(
            f"batch={job.batch} is more than there are: each step has all {epoch_samples} samples of an epoch."
        )
    return found


def _bubble(job: Job, plan: Plan) -> list[str]:
    micros = micro_batches(plan, job.batch)
    if plan.pp == 1 or micros >= plan.pp * plan.stages:
        return []
    stages = f"{micros} micro-batch{'es' if micros > 1 else ''} for {plan.pp * plan.stages} stages"
    what = "plain model parallelism, " if micros == 1 else ""
    found = f"{what}{stages}: ranks are idle for {_idle(plan, micros):.0%} of a step"
    better = _better(job, plan)
    if better is None:
        return [f"{found}; a larger batch would allow more of them."]
    many = micro_batches(better, job.batch)
    return [f"{found}; micro={better.micro} would make it {many} micro-batches, idle for {_idle(better, many):.0%}."]


def _idle(plan: Plan, micros: int) -> float:
    return bubble(order(plan.schedule, plan.pp, plan.stages, micros))


def _better(job: Job, plan: Plan) -> Plan | None:
    better = replace(plan, micro=max(1, largest_even(job.batch, plan.replicas) // (_ENOUGH * plan.pp)))
    return better if micro_batches(better, job.batch) > micro_batches(plan, job.batch) else None


_ITSELF = "(the model itself)"


def batch_statistics(module: nn.Module) -> list[str]:
    """Return names of modules that normalise by the statistics of their local batch."""
    return [
        name or _ITSELF
        for name, child in module.named_modules()
        if (isinstance(child, _NormBase) and not isinstance(child, _InstanceNorm | SyncBatchNorm))
        or (not isinstance(child, _NormBase) and statistics_of(child))
    ]


def dropouts(module: nn.Module) -> list[str]:
    """Return names of modules with random dropout in training, by type or by an attention's own rate."""
    return [
        name or _ITSELF
        for name, child in module.named_modules()
        if (isinstance(child, _DropoutNd) and child.p > 0)
        or (isinstance(child, nn.MultiheadAttention) and child.dropout > 0)
        or vars(child).get("draws_in_training") is True  # a layer of another library says so itself
    ]


def balances(module: nn.Module) -> bool:
    """Return True if the model has its own load-balancing loss, like transformers' mixtures of experts."""
    return any(getattr(getattr(child, "config", None), "output_router_logits", False) for child in module.modules())


def differs(module: nn.Module, job: Job, plan: Plan) -> list[str]:
    """Return a sentence for each computation of ``plan`` that differs from one device in every step."""
    own: Any = getattr(module, "own_notes", list)  # of a model of another library, which says so itself
    found: list[str] = own()
    split = plan.replicas > 1 or (plan.micro is not None and plan.micro < job.batch)
    if split and job.batch_statistics == "micro" and (names := batch_statistics(module)):
        found.append(
            f"BatchNorm takes its statistics from each micro-batch, not from the global batch: {show_names(names)}. "
            'batch_statistics="global" would make it exact.'
        )
    if split and balances(module):
        found.append(
            "the model's own load-balancing loss (output_router_logits) is a product of means over each micro-batch, "
            "not over the global batch. px.load_balancing_loss of its router_logits would make it exact."
        )
    return found


def notes(module: nn.Module, job: Job, plan: Plan) -> list[str]:
    """Return a sentence for each difference from one device under ``plan``."""
    found = [*([plan.exact_note] if plan.exact_note else []), *differs(module, job, plan)]
    split = plan.replicas > 1 or (plan.micro is not None and plan.micro < job.batch)
    if (split or plan.tp * plan.cp > 1) and (names := dropouts(module)):
        found.append(f"dropout draws other random numbers than on one device: {show_names(names)}.")
    if plan.shares == AUTO and (dropouts(module) or (job.batch_statistics == "micro" and batch_statistics(module))):
        found.append("shares=auto follows measured times: a run with dropout or BatchNorm does not repeat exactly.")
    if plan.threads > 1 and dropouts(module):
        found.append("dropout under threads draws from one shared stream: a run with dropout does not repeat exactly.")
    if plan.zero == 3 and job.unused == "allow":
        found.append("a parameter that only some ranks use in a step ends the run under zero=3; zero=2 allows it.")
    if plan.precision != "fp32":
        found.append(f"{plan.precision} rounds each operation; results agree within that rounding only.")
    if plan.precision == "fp16" and split:
        found.append("fp16 skips updates that overflow; near the limit that depends on the samples added at once.")
    return found + (_apart(job, plan) if plan.sync != "each" else [])


def _apart(job: Job, plan: Plan) -> list[str]:
    found = [
        "loss, count and gradient norm of a step are those of the first replica's share; each averaging tells the mean "
        "loss of all replicas."
    ]
    if job.clipping is not None:
        by = "the norm of its own gradient" if job.clipping.value is None else "each value of its own gradient"
        found.append(f"each replica clips by {by}.")
    return found


def without_gradient(names: Sequence[str], where: str) -> GradientError:
    """Return the error for parameters without a gradient; ``where`` such as ``in the first step``."""
    return GradientError(
        f"parameters that got no gradient {where}: {show_names(names, 8)}.\n"
        "    The loss does not depend on them; usually a forgotten branch, or a detach().\n"
        '    try: remove them, set requires_grad=False, or allow it: px.Job(..., unused="allow")'
    )
