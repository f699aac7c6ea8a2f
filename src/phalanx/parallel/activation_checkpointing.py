"""Activation recompute: keep less of forward in memory, and compute it again in backward.

``full`` keeps only each block's inputs (Chen et al. 2016) and costs one more forward. ``selective`` also keeps the
results of matrix products, convolutions and attention, which are dear to compute, and recomputes what lies between
(normalisation, activation functions), which is cheap to compute and large to keep (Korthikanti et al. 2022, section
5). The values stay the same: the same operations on the same inputs, random numbers included.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from phalanx.config import Plan
from phalanx.trace.blocks import leave_cache_out, parts
from phalanx.trace.operations import is_dear


def apply(module: nn.Module, plan: Plan, each: Iterable[nn.Module] | None = None) -> nn.Module:
    """Recompute ``each`` of the parts of ``module``, in place; names stay as they are.

    The cache of keys and values is left out: the second forward would append to it.
    """
    if plan.recompute == "none":
        return module
    leave_cache_out(module)
    extra: dict[str, Any] = {}
    if plan.recompute == "selective":
        extra["context_fn"] = partial(create_selective_checkpoint_contexts, _kept)
    for part in parts(module) if each is None else each:
        part.forward = partial(checkpoint, part.forward, use_reentrant=False, **extra)
    return module


def _kept(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    schema = func._schema
    keeps = is_dear(schema.name.partition("::")[2]) and not schema.is_mutable  # a result written over is gone
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
