"""Activation recompute: keep less of the forward in memory, and compute it again in backward.

``full`` keeps only each block's inputs (Chen et al. 2016) and costs one more forward. ``selective`` also keeps the
results of matrix products, convolutions and attention, which are expensive to compute, and recomputes the rest
(normalisation, activation functions), which is cheap to compute and large to keep (Korthikanti et al. 2022, section 5).
The values stay the same: the same operations on the same inputs, random numbers included. BatchNorm's running
statistics count a batch once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from phalanx.config import Plan
from phalanx.parallel.buffer_sync import statistics_kept, statistics_of
from phalanx.trace.blocks import leave_cache_out, parts
from phalanx.trace.operations import is_dear


def recomputes(plan: Plan) -> bool:
    """Return True if backward computes activations again."""
    return plan.recompute != "none"


def apply(module: nn.Module, plan: Plan, each: Iterable[nn.Module] | None = None) -> nn.Module:
    """Recompute ``each`` of the parts of ``module``, in place; names stay the same.

    The cache of keys and values is switched off, because the second forward would append to it.
    """
    if not recomputes(plan):
        return module
    leave_cache_out(module)
    for part in parts(module) if each is None else each:
        extra = _contexts(part, selective=plan.recompute == "selective")
        part.forward = partial(checkpoint, part.forward, use_reentrant=False, **extra)
    return module


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""What is around the first forward of a part, and around the second."""


def _contexts(part: nn.Module, *, selective: bool) -> dict[str, Any]:
    """Return ``context_fn`` of ``checkpoint`` if needed: torch.compile accepts only that of selective recompute."""
    choose = partial(create_selective_checkpoint_contexts, _kept) if selective else None
    if any(map(statistics_of, part.modules())):
        return {"context_fn": partial(_counted_once, part, choose)}
    return {"context_fn": choose} if choose else {}


def _counted_once(part: nn.Module, choose: Callable[[], Contexts] | None) -> Contexts:
    first, again = choose() if choose else (nullcontext(), nullcontext())
    return first, _second(part, again)


@contextmanager
def _second(part: nn.Module, within: AbstractContextManager[Any]) -> Generator[None]:
    """Keep BatchNorm from counting the recomputed forward of ``part`` a second time."""
    with statistics_kept(part), within:
        yield


def _kept(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    schema = func._schema
    keeps = is_dear(schema.name.partition("::")[2]) and not schema.is_mutable  # a result written over is gone
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
