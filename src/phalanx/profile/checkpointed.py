"""What a model recomputes by itself, with ``torch.utils.checkpoint``, as a trace sees it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import checkpoint as checkpointing
from torch.utils._pytree import tree_leaves

from phalanx.profile.recorder import Recorder


@contextmanager
def recomputation_seen(recorder: Recorder) -> Iterator[None]:
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


def _again(recorder: Recorder, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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
