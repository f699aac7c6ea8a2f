"""One outcome on every rank: an error on one rank is raised on all, with one message, and no rank waits for ever.

Ranks exchange JSON only, so that data from a rank cannot run code on another.
"""

from __future__ import annotations

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from threading import Event
from typing import Any, TypeVar, final

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyrefly: ignore

from phalanx.comm.json_messages import (
    alike_everywhere,
    broadcast_json,
    gather_json,
    gather_json_to_first,
    receive_json,
    scatter_json,
    send_json_to_first,
    true_anywhere,
)
from phalanx.errors import CheckpointError, DamagedError
from phalanx.units import show_names

T = TypeVar("T")

_LOOKS = 20_000  # at a store a second, at most, of all ranks together


def grouped() -> bool:
    """Return True if this process belongs to a default process group."""
    return dist.is_available() and dist.is_initialized()


def is_first() -> bool:
    """Return True if this process has rank 0 of the default group, or there is none."""
    return not grouped() or dist.get_rank() == 0


def from_all(value: Any) -> list[Any]:
    """Return the JSON value of each rank of the default group, by rank. Collective."""
    if not grouped() or dist.get_world_size() == 1:
        return [value]
    return gather_json(value)


def from_first(value: T) -> T:
    """Return the JSON value of rank 0 of the default group. Collective."""
    return value if not grouped() or dist.get_world_size() == 1 else broadcast_json(value)


def anywhere(here: bool) -> bool:
    """Return True if ``here`` is true on any rank of the default group. Collective."""
    return here if not grouped() or dist.get_world_size() == 1 else true_anywhere(here)


def on_all_ranks(action: Callable[[], T]) -> T:
    """Run ``action`` on every rank of the default group (in this process if there is none) and return its result.

    Raises:
        DamagedError: on all ranks, if damage is the only kind of failure.
        CheckpointError: on all ranks if it failed on any, with the messages of the failed ranks.
    """
    outcome = RankOutcome.of(action)
    if anywhere(outcome.failure is not None):  # messages are sent only then
        outcome.settle(failed_of(from_all(outcome.failure)))
    return outcome.result


def failed_of(failures: Iterable[dict[str, Any] | None]) -> dict[str, dict[str, Any]]:
    """Map rank to failure, for the ranks that failed; JSON."""
    return {str(rank): failure for rank, failure in enumerate(failures) if failure is not None}


@final
class RankOutcome:
    """The result of an action, or its failure.

    Attributes:
        failure: JSON for other ranks; ``None`` after success.
    """

    def __init__(self, result: Any, error: BaseException | None) -> None:
        self.result, self._error, self.failure = result, error, None
        if error is not None:
            self.failure = {"text": _text(error)}
            if isinstance(error, DamagedError):
                self.failure |= {"checkpoint": error.checkpoint, "file": error.file, "tensor": error.tensor}

    @classmethod
    def of(cls, action: Callable[[], Any]) -> RankOutcome:
        """Run ``action``. An interrupt is raised only after the other ranks know of it, too."""
        try:
            return cls(action(), None)
        except BaseException as error:
            return cls(None, error)

    def settle(self, failed: Mapping[str, dict[str, Any]]) -> None:
        """Raise the failure of any rank; ``failed`` is the result of ``failed_of``."""
        by = {int(rank): failure for rank, failure in failed.items()}
        if not by:
            return
        if self._error is not None and not isinstance(self._error, Exception):
            raise self._error
        text = by_rank({rank: failure["text"] for rank, failure in by.items()})
        cause = None if isinstance(self._error, CheckpointError) else self._error
        if all("checkpoint" in failure for failure in by.values()):
            first = next(iter(by.values()))
            raise DamagedError(
                text, checkpoint=first["checkpoint"], file=first["file"], tensor=first["tensor"]
            ) from cause
        raise CheckpointError(text) from cause


def distinct(value: T) -> list[T]:
    """Return the different JSON values among the default group's ranks, those of lower ranks first.

    Each value is sent by one rank only, because replicas among many ranks hold equal values. If all are equal, none is
    sent.
    """
    if not grouped() or dist.get_world_size() == 1 or alike_everywhere(value):
        return [value]
    return broadcast_json(different_at_first(value)[0])


def different_at_first(value: T) -> tuple[list[T], list[int]]:
    """Return on rank 0 the result of ``distinct``, and each rank's index into it; empty lists on other ranks.

    Collective, for a default group of several ranks. Only the first rank receives all values.
    """
    digests = gather_json_to_first(digest_of(value))
    places = {one: index for index, one in enumerate(dict.fromkeys(digests))}
    firsts = {one: rank for rank, one in reversed([*enumerate(digests)])}
    sends = scatter_json([firsts[one] == rank for rank, one in enumerate(digests)])
    if dist.get_rank():
        if sends:
            send_json_to_first(value)
        return [], []
    different = [value if firsts[one] == 0 else receive_json(firsts[one]) for one in places]
    return different, [places[one] for one in digests]


def digest_of(value: Any) -> str:
    """Return a digest that is equal for equal JSON on any rank."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


Decision = Callable[[list[Any]], Any]
"""What rank 0 makes of what each rank gave, by rank; what it returns all ranks get."""


class Rendezvous(ABC):
    """A meeting in which each rank gives rank 0 a JSON value, and all ranks get rank 0's decision."""

    rank: int

    @abstractmethod
    def decide(self, given: Any, decision: Decision) -> Any:
        """Return rank 0's result of ``decision`` on every rank. All ranks must call it equally often."""


@final
class GroupRendezvous(Rendezvous):
    """A rendezvous by collectives of the default process group, or alone without a group."""

    def __init__(self) -> None:
        self.rank = dist.get_rank() if grouped() else 0

    def decide(self, given: Any, decision: Decision) -> Any:
        if not grouped() or dist.get_world_size() == 1:
            return decision([given])
        everything = gather_json_to_first(given)
        return broadcast_json(decision(everything) if self.rank == 0 else None)


@final
class StoreRendezvous(Rendezvous):
    """A rendezvous by keys of a store, so that a thread can meet others during the main thread's collectives.

    Args:
        store: the ranks' store; no other thread uses this client.
        prefix: of the keys, never used before.
        patience: seconds to wait for the others.
        given_up: set once the result is no longer wanted.
    """

    def __init__(
        self, store: Store, prefix: str, rank: int, world_size: int, *, patience: float, given_up: Event
    ) -> None:
        self.rank, self._world_size = rank, world_size
        self._store = PrefixStore(prefix, store)
        self._patience, self._given_up, self._rounds = patience, given_up, 0

    def decide(self, given: Any, decision: Decision) -> Any:
        self._rounds += 1
        if self.rank:
            self._store.set(f"{self._rounds}/{self.rank}", json.dumps(given))
            return json.loads(self._wait_for(f"{self._rounds}/verdict"))
        others = [f"{self._rounds}/{rank}" for rank in range(1, self._world_size)]
        everything = [given, *(json.loads(self._wait_for(key)) for key in others)]
        for key in others:
            self._store.delete_key(key)
        verdict = decision(everything)
        self._store.set(f"{self._rounds}/verdict", json.dumps(verdict))
        return verdict

    def _wait_for(self, key: str) -> bytes:
        deadline, pause = time.monotonic() + self._patience, 0.002
        while not self._store.check([key]):
            if self._given_up.wait(pause):
                raise CheckpointError("the save was given up: the run ended before all ranks had written")
            if time.monotonic() > deadline:
                raise CheckpointError(f"the other ranks were not heard of for {self._patience:g} s")
            pause = min(2 * pause, max(0.2, self._world_size / _LOOKS))
        return self._store.get(key)


def by_rank(texts: Mapping[int, str]) -> str:
    """Join the messages by rank; equal messages, and a single process, give one without ranks."""
    different = set(texts.values())
    if len(different) == 1 and (not grouped() or len(texts) == dist.get_world_size()):
        return different.pop()
    return "\n".join(f"rank {rank}: {text}" for rank, text in sorted(texts.items()))


def some(names: Iterable[str]) -> str:
    """Return the first ten of ``names``, sorted, and the number of further names."""
    return show_names(sorted(names), 10)


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError | OSError) else f"{type(error).__name__}: {error}"
