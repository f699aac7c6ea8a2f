"""What a trace sees beyond operations: what a model recomputes by itself, and whether a mask hides later positions."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import checkpoint as checkpointing
from torch.utils._pytree import tree_leaves

from phalanx.trace.operation_recorder import OperationRecorder


@contextmanager
def recomputation_seen(recorder: OperationRecorder) -> Iterator[None]:
    """Inside, ``recorder`` knows what lies in a checkpoint, what that keeps, and what is computed a second time.

    A reentrant checkpoint runs as the other kind does, which ``torch.autograd.grad`` can follow: it keeps and computes
    the same, and gives nothing a gradient where nothing that it is called with wants one.
    """
    generator = checkpointing._checkpoint_without_reentrant_generator

    def checkpointed(function: Callable[..., Any], preserve: bool, *rest: Any, **kwargs: Any) -> Generator[None]:
        recorder.keep(leaf for leaf in tree_leaves((rest, kwargs)) if isinstance(leaf, Tensor))
        # Which numbers are drawn changes no cost.
        with recorder.checkpoint():
            yield from generator(partial(_again, recorder, function), False, *rest, **kwargs)

    with (
        patch.object(checkpointing, "_checkpoint_without_reentrant_generator", checkpointed),
        patch.object(checkpointing, "CheckpointFunction", _Reentrant),
    ):
        yield


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` in a checkpoint of its own."""
    return partial(checkpointing.checkpoint, function, use_reentrant=False)


def _again(recorder: OperationRecorder, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with recorder.recomputing():
        return function(*args, **kwargs)


class _Reentrant:
    """In place of ``CheckpointFunction``."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if not any(leaf.requires_grad for leaf in args if isinstance(leaf, Tensor)):
            with torch.no_grad():
                return function(*args)
        with checkpointing.set_checkpoint_early_stop(False):
            return checkpointing.checkpoint(function, *args, use_reentrant=False)


def hides_later(mask: Tensor) -> bool:
    """Whether all above the diagonal is one value and the rest another; false of tensors without values."""
    if mask.is_meta or isinstance(mask, FakeTensor) or mask.dim() < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    size = mask.shape[-1]
    if size < 2 or mask.numel() > _LARGE:
        return False
    later = torch.ones(size, size, dtype=torch.bool).triu(1)
    values = mask.detach().to("cpu").reshape(-1, size, size)
    above, below = values[:, later], values[:, ~later]
    return bool((above == above[0, 0]).all() and (below == below[0, 0]).all() and above[0, 0] != below[0, 0])


_LARGE = 2**26
