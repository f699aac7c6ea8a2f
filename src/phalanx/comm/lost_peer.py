"""Telling an exception that only says that another process is gone from one that says what went wrong."""

from __future__ import annotations

import re

LOST = "phalanx/lost"
"""The key of the store at which ranks have met that is set once one of them is known to be gone."""

_KINDS = {
    "DistNetworkError",
    "DistStoreError",
    "DistBackendError",
    "BrokenPipeError",
    "ConnectionResetError",
    "ConnectionAbortedError",
    "ConnectionRefusedError",
    "PeerLostError",
}
_TEXTS = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|connection was likely closed|broken pipe|socket closed|"
    r"gloo.*(timed out|timeout)|nccl.*(abort|remote|system error|timeout|unhandled)|remote process exited|"
    r"application timeout caused pair closure|store.*timed out|wait timeout after",
    re.IGNORECASE | re.DOTALL,
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
    if type(error).__name__ in _KINDS:
        return True
    return isinstance(error, RuntimeError | OSError) and bool(_TEXTS.search(str(error)))
