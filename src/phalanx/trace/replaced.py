"""Temporary replacement of functions of torch that have no hook.

This file relies on details that torch does not promise, and must be checked for each new version.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.utils import checkpoint as checkpointing

_ABSENT = object()


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Give ``owner``, a module or a class, these attributes for the block."""
    before = {name: vars(owner).get(name, _ABSENT) for name in attributes}
    for name, attribute in attributes.items():
        setattr(owner, name, attribute)
    try:
        yield
    finally:
        for name, attribute in before.items():
            if attribute is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, attribute)


@contextmanager
def each_checkpoint(run: Callable[..., Generator[None]]) -> Iterator[None]:
    """Run ``run(generator, function, *settings_and_args, **kwargs)`` in place of each checkpoint in the block.

    For checkpoints that are not reentrant; ``generator`` is torch's own, which takes the arguments after it.
    """
    own = checkpointing._checkpoint_without_reentrant_generator
    with replaced(checkpointing, _checkpoint_without_reentrant_generator=partial(run, own)):
        yield
