"""Who is there: how workers of torchrun meet at a store, and which errors only say that a peer is gone.

torch waits at the store in silence until all have come. Where ``RANK`` and ``WORLD_SIZE`` are left over from something
else nobody comes, so whoever waits for more than a few seconds says for whom.
"""

from __future__ import annotations

import re
import socket
import sys
import time
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING
from uuid import uuid4

from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from phalanx.errors import RunError

if TYPE_CHECKING:
    from phalanx.comm.process_group import Place

LOST = "phalanx/lost"
"""The key of the store at which ranks have met that is set once one of them is known to be gone."""


def rank_is_lost(store: Store) -> bool:
    """Whether one of the ranks that have met at ``store`` is known to be gone; ``store`` may be a part of theirs."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.check([LOST])


_SAYS = 5.0  # seconds of silence before what is waited for is said, and then each time twice as many
_TRY = 2.0  # seconds for one attempt to reach the store
_LOOK = 0.02, 0.5  # seconds between looks whether somebody is there, at first and at most
_LOOKS = 20_000  # a second, at most, of all ranks together: what one store answers without falling behind
_MOST = 12  # ranks that are named
_MANY = 1024  # ranks of which one alone looks for those that are missing
_COUNT, _ALL = "phalanx/here/count", "phalanx/here/all"

_LOST_KINDS = {
    "DistNetworkError",
    "DistStoreError",
    "DistBackendError",
    "BrokenPipeError",
    "ConnectionResetError",
    "ConnectionAbortedError",
    "ConnectionRefusedError",
    "PeerLostError",
}
_LOST_TEXTS = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|connection was likely closed|broken pipe|socket closed|"
    r"gloo.*(timed out|timeout)|nccl.*(abort|remote|system error|timeout|unhandled)|remote process exited|"
    r"application timeout caused pair closure|store.*timed out|wait timeout after",
    re.IGNORECASE | re.DOTALL,
)


def meet_all(place: Place) -> Store:
    """The store, once every worker is there. Collective.

    Raises:
        RunError: if not all have come within the timeout.
    """
    waiting = _RollCall(place)
    reached = _reach(place, waiting)
    reached.set_timeout(place.patience)
    store = PrefixStore(f"phalanx/attempt/{place.attempt}", reached)
    if place.world_size > 1:
        _call(place, store, waiting)
    return store


class _RollCall:
    """Says now and then what is waited for, and gives up in the end."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._began = time.monotonic()
        self._says = _SAYS

    def go_on(self, what: Callable[[], str], *, speaks: Callable[[], bool] = lambda: True) -> bool:
        """``what`` is waited for, in words, and whether this rank ``speaks``: asked when it is to be said.

        Returns whether there is anything to wait for, as far as is known.
        """
        place, waited = self._place, time.monotonic() - self._began
        who = f"rank {place.rank} of {place.world_size}"
        if waited <= min(self._says, place.timeout):
            return True
        self._says *= 2
        if waited <= place.timeout and not speaks():
            return True
        if not (missing := what()):
            return False
        if waited > place.timeout:
            raise RunError(f"{who} has waited {waited:.0f} s {missing}{_hint(place)}")
        print(f"{who} waits {missing}{_hint(place)}", file=sys.stderr, flush=True)
        return True


def _reach(place: Place, waiting: _RollCall) -> TCPStore:
    host, _, port = place.meeting.rpartition(":")
    serves, look = place.rank == 0 and not place.agent, _LOOK[0]
    server = "torchrun's agent" if place.agent else "rank 0"
    while not serves and not answers(place.meeting):
        time.sleep(look)
        look = min(2 * look, _LOOK[1])
        waiting.go_on(lambda: f"for {server}, which does not answer at {place.meeting}")
    try:
        # multi_tenant: the user's own init_process_group in this process may serve the same port
        how = {"is_master": serves, "wait_for_workers": False, "multi_tenant": True}
        return TCPStore(host, int(port), timeout=place.patience, **how)
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        raise RunError(f"rank {place.rank} cannot use the store at {place.meeting}: {first}{_hint(place)}") from error


def answers(meeting: str) -> bool:
    """Whether somebody listens at ``host:port``. torch would try itself, and print pages about each attempt."""
    host, _, port = meeting.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_TRY).close()
    except OSError:
        return False
    return True


def _call(place: Place, store: Store, waiting: _RollCall) -> None:
    """Wait until every rank has said that it is there.

    Each counts itself once, and the last one says that all are there: a rank waits for one key, not for one of every
    rank. Which are missing is looked for only when it is to be said, by the one that says it.
    """
    own = uuid4().hex  # a process that was forked comes a second time
    if store.compare_set(_key(place.rank), "", own) == own.encode() and store.add(_COUNT, 1) == place.world_size:
        store.set(_ALL, "1")
    least = place.world_size / _LOOKS
    look = max(_LOOK[0], least)
    while not store.check([_ALL]):
        time.sleep(look)
        look = max(least, min(2 * look, _LOOK[1]))
        if not waiting.go_on(lambda: _missing(place, store), speaks=lambda: _speaks(place, store)):
            store.set(_ALL, "1")  # one that had said it was there is gone before it was counted


def _missing(place: Place, store: Store) -> str:
    """Which ranks are waited for, looked for no further than they are named; empty where none is missing.

    Of many ranks one looks for all: each would ask the store for each other rank.
    """
    if place.world_size > _MANY and not _speaks(place, store):
        return f"for ranks that are not yet at {place.meeting}"
    there = (rank for rank in range(place.world_size) if not store.check([_key(rank)]))
    if not (missing := list(islice(there, _MOST + 1))):
        return ""
    names = ", ".join(map(str, missing[:_MOST])) + (" and more" if len(missing) > _MOST else "")
    return f"for {'rank' if len(missing) == 1 else 'ranks'} {names}, not yet at {place.meeting}"


def _speaks(place: Place, store: Store) -> bool:
    """Whether this is the first of the ranks that are there, the one that says for whom all wait."""
    return not any(store.check([_key(rank)]) for rank in range(place.rank))


def _key(rank: int) -> str:
    return f"phalanx/here/{rank}"


def _hint(place: Place) -> str:
    if place.agent or place.torchrun:
        return ""
    return (
        "\n    RANK and WORLD_SIZE say that there are more processes, and it was not torchrun that started this one."
        "\n    try: env -u RANK -u WORLD_SIZE -u LOCAL_RANK, and the same command, if they are left over"
    )


def reports_lost_peer(error: BaseException) -> bool:
    """Whether the exception that began the chain only says that a peer is gone."""
    visited: set[int] = set()
    while id(error) not in visited:
        visited.add(id(error))
        earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if earlier is None:
            break
        error = earlier
    if type(error).__name__ in _LOST_KINDS:
        return True
    return isinstance(error, RuntimeError | OSError) and bool(_LOST_TEXTS.search(str(error)))
