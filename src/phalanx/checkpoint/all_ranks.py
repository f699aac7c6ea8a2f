"""One outcome on every rank: what fails on one fails on all, with one readable message and no rank left waiting."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from phalanx.errors import CheckpointError
from phalanx.units import show_names

T = TypeVar("T")


def grouped() -> bool:
    """Whether this process belongs to a default process group."""
    return dist.is_available() and dist.is_initialized()


def on_all_ranks(action: Callable[[], T]) -> T:
    """The result of ``action``, run by every rank of the default group (by this process where there is none).

    Raises:
        CheckpointError: on all ranks if it failed on any, with the messages of those on which it failed.
    """
    result: T | None = None
    cause: Exception | None = None
    try:
        result = action()
    except Exception as error:
        cause = error
    failure = _text(cause) if cause else None
    failures: list[str | None] = [failure]
    if grouped():
        failures = [None] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
    texts = {rank: text for rank, text in enumerate(failures) if text is not None}
    if texts:
        raise CheckpointError(by_rank(texts)) from (None if isinstance(cause, CheckpointError) else cause)
    return result  # type: ignore[return-value]


def distinct(value: T) -> list[T]:
    """The different values that the ranks of the default group hold, those of lower ranks first; each rank gives one.

    Values are JSON. Each is sent by one rank only: of a thousand ranks, replicas hold the same.
    """
    if not grouped():
        return [value]
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    if len(set(digests)) == 1:
        return [value]
    values: list[T | None] = [None] * len(digests)
    dist.all_gather_object(values, value if digests.index(digest) == dist.get_rank() else None)
    return [value for value in values if value is not None]


def readable(error: CheckpointException) -> str:
    """What went wrong on which rank, without the tracebacks that DCP gathers."""
    return by_rank({rank: _text(wrapped[0]) for rank, wrapped in error.failures.items()})


def by_rank(texts: Mapping[int, str]) -> str:
    """The messages; said once, and without ranks, where all are the same or there is only this process."""
    different = set(texts.values())
    if len(different) == 1 and (not grouped() or len(texts) == dist.get_world_size()):
        return different.pop()
    return "\n".join(f"rank {rank}: {text}" for rank, text in sorted(texts.items()))


def some(names: Iterable[str]) -> str:
    """The first ten of ``names``, sorted, and how many more there are."""
    return show_names(sorted(names), 10)


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError | OSError) else f"{type(error).__name__}: {error}"
