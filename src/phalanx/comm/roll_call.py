"""Who is there: how workers of torchrun meet at a store, and which errors only say that a peer is gone.

torch waits at the store in silence until all have come. Where ``RANK`` and ``WORLD_SIZE`` are left over from something
else nobody comes, so whoever waits for more than a few seconds says for whom.
"""

from __future__ import annotations

import re
import socket
import sys
import time
from typing import TYPE_CHECKING

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
_LOOK = 0.02, 0.5  # seconds between looks at who is there, at first and at most
_MOST = 12  # ranks that are named

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

    def go_on(self, what: str, *, speaks: bool = True) -> None:
        place, waited = self._place, time.monotonic() - self._began
        who = f"rank {place.rank} of {place.world_size}"
        if waited > place.timeout:
            raise RunError(f"{who} has waited {waited:.0f} s {what}{_hint(place)}")
        if waited > self._says:
            self._says *= 2
            if speaks:
                print(f"{who} waits {what}{_hint(place)}", file=sys.stderr, flush=True)


def _reach(place: Place, waiting: _RollCall) -> TCPStore:
    host, _, port = place.meeting.rpartition(":")
    serves, look = place.rank == 0 and not place.agent, _LOOK[0]
    while not serves and not answers(place.meeting):
        time.sleep(look)
        look = min(2 * look, _LOOK[1])
        server = "torchrun's agent" if place.agent else "rank 0"
        waiting.go_on(f"for {server}, which does not answer at {place.meeting}")
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
    """Wait until every rank has said that it is there."""
    store.set(_key(place.rank), "1")
    missing, look = list(range(place.world_size)), _LOOK[0]
    while missing := [rank for rank in missing if not store.check([_key(rank)])]:
        time.sleep(look)
        look = min(2 * look, _LOOK[1])
        names = ", ".join(map(str, missing[:_MOST])) + (" and more" if len(missing) > _MOST else "")
        first = min(set(range(place.world_size)) - set(missing))
        waiting.go_on(
            f"for {'ranks' if len(missing) > 1 else 'rank'} {names}, not yet at {place.meeting}",
            speaks=place.rank == first,
        )


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
