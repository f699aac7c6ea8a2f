"""Roll call: workers of torchrun meet at a store; and recognition of errors caused by a lost peer.

torch waits at the store in silence until all have come. If ``RANK`` and ``WORLD_SIZE`` are left over from another run,
the others never come; after a few seconds the missing ranks are named.
"""

from __future__ import annotations

import re
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING
from uuid import uuid4

from torch.distributed import PrefixStore, Store, TCPStore  # pyrefly: ignore

from phalanx.device_kinds import all_kinds
from phalanx.errors import RunError

if TYPE_CHECKING:
    from phalanx.comm.process_group import Place

_SAYS = 5.0  # seconds of silence before what is waited for is said, and then each time twice as many
_TRY = 2.0  # seconds for one attempt to reach the store
_LOOK = 0.01, 0.5  # seconds between looks whether somebody is there, at first and at most
_LATE = 0.1  # of the time that was waited so far: what a look may be too late
_LOOKS = 20_000  # a second, at most, of all ranks together: what one store answers without falling behind
_MOST = 12  # ranks that are named
_MANY = 1024  # ranks of which one alone looks for those that are missing
_LED, _COUNT, _ALL = "phalanx/led", "phalanx/here/count", "phalanx/here/all"

_LOST_KINDS = {
    "DistNetworkError",
    "DistStoreError",
    "DistBackendError",
    "LostError",
    "BrokenPipeError",
    "ConnectionResetError",
    "ConnectionAbortedError",
    "ConnectionRefusedError",
}
_LOST_TEXTS = (
    r"connection (was )?(closed|reset|refused|aborted)|connection was likely closed|broken pipe|socket closed|"
    r"remote process exited|application timeout caused pair closure|store.*timed out|wait timeout after"
)  # and what each kind's backend says


_words: dict[tuple[str, int], str] = {}  # of this process, and of those that it was forked from


def word_of(meeting: str, rank: int) -> str:
    """Return the unique word of this start at ``meeting``; empty before all ranks have met."""
    return _words.get((meeting, rank), "")


def meet_all(place: Place) -> Store:
    """Return the store, once every worker is there. Collective.

    The store may outlive workers and serve their restart: keys of earlier starts are hidden in the returned store. Rank
    0 makes a new word for each start. Restart counts cannot be used: each torchrun agent counts only failures on its
    own host.

    Raises:
        RunError: if not all have come within the timeout.
    """
    waiting = _RollCall(place)
    reached = _reach(place, waiting)
    reached.set_timeout(place.patience)
    word = word_of(place.meeting, place.rank)  # a process that was forked has met
    if not word:
        word = (_follow if place.rank else _lead)(place, reached, waiting)
        _words[place.meeting, place.rank] = word
    return _of_start(reached, word)


def _of_start(reached: Store, word: str) -> Store:
    return PrefixStore(f"phalanx/start/{word}", reached)


class _RollCall:
    """The messages and the timeout of a wait for other ranks."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._began = time.monotonic()
        self._says = _SAYS

    def go_on(self, what: Callable[[], str], *, speaks: Callable[[], bool] = lambda: True) -> bool:
        """Report the wait for ``what`` now and then, if this rank ``speaks``; return False once the wait is over."""
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
    serves, began = place.rank == 0 and not place.agent, time.monotonic()
    server = "torchrun's agent" if place.agent else "rank 0"
    while not serves and not answers(place.meeting):
        _pause(began, least=min(_LOOK[1], place.world_size / _LOOKS))
        waiting.go_on(lambda: f"for {server}, which does not answer at {place.meeting}")
    try:
        # multi_tenant: the user's own init_process_group in this process may serve the same port
        how = {"is_master": serves, "wait_for_workers": False, "multi_tenant": True}
        return TCPStore(host, int(port), timeout=place.patience, **how)
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        raise RunError(f"rank {place.rank} cannot use the store at {place.meeting}: {first}{_hint(place)}") from error


def answers(meeting: str) -> bool:
    """Return True if ``host:port`` accepts connections. torch itself would print pages about each attempt."""
    host, _, port = meeting.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_TRY).close()
    except OSError:
        return False
    return True


def _lead(place: Place, reached: Store, waiting: _RollCall) -> str:
    """Publish a word as rank 0, wait until all other ranks have counted themselves under it, and confirm.

    A rank waits for one key, not for a key of every rank. Missing ranks are looked up only when they are reported,
    by the rank that reports them.
    """
    word = uuid4().hex
    store = _of_start(reached, word)
    store.set(_key(0), word)
    reached.set(_LED, word)
    began = time.monotonic()
    while store.add(_COUNT, 0) < place.world_size - 1:
        _pause(began)
        if not waiting.go_on(partial(_missing, place, store)):
            break  # one that had said it was there is gone before it was counted
    store.set(_ALL, "1")
    return word


def _follow(place: Place, reached: Store, waiting: _RollCall) -> str:
    """Count this rank under rank 0's newest word until rank 0 confirms that all ranks have."""
    own, word, counted, store = uuid4().hex, "", False, reached
    began = time.monotonic()
    while True:
        newest = reached.get(_LED).decode() if reached.check([_LED]) else ""
        if newest != word:
            word, store, began = newest, _of_start(reached, newest), time.monotonic()
            # where this rank has been counted before, the word is that of an earlier start
            if counted := store.compare_set(_key(place.rank), "", own) == own.encode():
                store.add(_COUNT, 1)
        if counted and store.check([_ALL]):
            return word
        _pause(began, least=place.world_size / _LOOKS)
        met = store if counted else None
        waiting.go_on(partial(_missing, place, met), speaks=partial(_speaks, place, met))


def _pause(began: float, *, least: float = 0.0) -> None:
    """Return the seconds until the next look: short at first, so that looking does not delay a start."""
    time.sleep(max(least, min(_LOOK[1], max(_LOOK[0], _LATE * (time.monotonic() - began)))))


def _missing(place: Place, store: Store | None) -> str:
    """Return missing ranks, as many as are named in a message; empty on rank 0 if all are present.

    ``None``: this rank has no ``store`` for this start. One rank looks for all, so that the store is not asked by each
    rank about every other.
    """
    if store is None:
        return f"for rank 0, not yet at {place.meeting}"
    if place.world_size > _MANY and not _speaks(place, store):
        return f"for ranks that are not yet at {place.meeting}"
    there = (rank for rank in range(place.world_size) if not store.check([_key(rank)]))
    if not (missing := list(islice(there, _MOST + 1))):
        return f"for rank 0 at {place.meeting} to say that all are there" if place.rank else ""
    names = ", ".join(map(str, missing[:_MOST])) + (" and more" if len(missing) > _MOST else "")
    return f"for {'rank' if len(missing) == 1 else 'ranks'} {names}, not yet at {place.meeting}"


def _speaks(place: Place, store: Store | None) -> bool:
    """Return True on the first rank present, which reports for all; on one rank a host if that is unknown."""
    if store is None:
        return place.local_rank == 0
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
    """Return True if the exception that began the chain only reports a lost peer."""
    visited: set[int] = set()
    while id(error) not in visited:
        visited.add(id(error))
        earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if earlier is None:
            break
        error = earlier
    if type(error).__name__ in _LOST_KINDS:
        return True
    pattern = "|".join([_LOST_TEXTS, *(kind.lost_peer for kind in all_kinds() if kind.lost_peer)])
    return isinstance(error, RuntimeError | OSError) and bool(re.search(pattern, str(error), re.IGNORECASE | re.DOTALL))
