"""What a model's own code calls without a torch function mode seeing it: autograd functions, activation checkpointing.

A stage runs that code on stand-ins for what other stages compute. A custom ``autograd.Function`` takes them as they
are, and ``torch.utils.checkpoint`` keeps them for backward, when nothing swaps them any more. So both are told to the
run: a function's arguments are swapped like an operation's, and what lies inside a checkpoint is recomputed unit by
unit, from the values that the units are called with.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch.autograd.function import _SingleLevelFunction
from torch.utils import checkpoint as checkpointing

Recompute = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Gives a call that does the same and computes its activations a second time in backward."""


class Sees(Protocol):
    """A run of a model that is told of these calls.

    Attributes:
        inside: whether a unit is running, whose calls are its own.
    """

    inside: bool

    def function(self, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """The result of an autograd function outside of units."""
        ...

    def learns(self, args: tuple[Any, ...]) -> bool:
        """Whether what the next reentrant checkpoint outside of units is called with requires a gradient."""
        ...

    def recomputing(self, how: Recompute) -> AbstractContextManager[None]:
        """Around what lies inside a checkpoint, in a unit or outside of units."""
        ...


@contextmanager
def told_to(run: Sees) -> Iterator[None]:
    """While inside, ``run`` is told."""
    generator = checkpointing._checkpoint_without_reentrant_generator

    def applied(cls: Any, *args: Any) -> Any:
        def call(*given: Any) -> Any:
            return super(_SingleLevelFunction, cls).apply(*given)  # pyright: ignore[reportAttributeAccessIssue]

        if cls is checkpointing.CheckpointFunction:
            return _reentrant(run, call, *args)
        return call(*args) if run.inside else run.function(call, args)

    def checkpointed(function: Any, *args: Any, **kwargs: Any) -> Generator[None]:
        own = run.inside
        settings = dict(zip(_SETTINGS, args, strict=False))  # as ``checkpoint`` gives them, before the arguments
        with run.recomputing(_again(**settings)):
            if own:
                yield from generator(function, *args, **kwargs)
            else:
                yield

    with (
        patch.object(_SingleLevelFunction, "apply", classmethod(applied), create=True),
        patch.object(checkpointing, "_checkpoint_without_reentrant_generator", checkpointed),
    ):
        yield


_SETTINGS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")


def _again(**settings: Any) -> Recompute:
    return lambda call: partial(checkpointing.checkpoint, call, use_reentrant=False, **settings)


def _reentrant(run: Sees, call: Callable[..., Any], function: Any, preserve: bool, *args: Any) -> Any:
    with run.recomputing(_again(preserve_rng_state=preserve)):
        if run.inside:
            return call(function, preserve, *args)
        # Nothing that it computes gets a gradient then, its parameters' included.
        with nullcontext() if run.learns(args) else torch.no_grad():
            return function(*args)
