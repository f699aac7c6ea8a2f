"""A function in place of torch's own, for a while: for what torch has no hook for.

What is relied upon here torch does not promise; the next version is looked at in this file.
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
    """While inside, ``owner``, a module or a class, has these attributes."""
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
    """While inside, ``run(generator, function, *settings_and_args, **kwargs)`` is what a checkpoint does.

    One that is not reentrant; ``generator`` is torch's own, which takes what comes after it.
    """
    own = checkpointing._checkpoint_without_reentrant_generator
    with replaced(checkpointing, _checkpoint_without_reentrant_generator=partial(run, own)):
        yield
