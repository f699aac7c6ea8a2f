"""torchrun's rendezvous of nodes that may come and go, with a state that only those who have the run's key can write.

torch keeps the state as a pickle, in a store that answers whoever reaches its port. Here an HMAC-SHA256 stands before
it, and a state without the right one is refused before torch reads it.
"""

from __future__ import annotations

import hmac
from functools import partial
from typing import final

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStateError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler

_NAME = "phalanx-signed"
_SIGNATURE = 32  # bytes


@final
class SignedBackend(RendezvousBackend):
    """Keeps in ``plain`` what it is given, with a signature under ``key`` that holds for ``run_id`` alone."""

    def __init__(self, plain: RendezvousBackend, run_id: str, key: bytes) -> None:
        self._plain, self._run, self._key = plain, run_id.encode(), key

    @property
    def name(self) -> str:
        return _NAME

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its token, ``None`` before there is one.

        Raises:
            RendezvousStateError: the state was not signed with the key.
        """
        found = self._plain.get_state()
        return found and (self._checked(found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Set it where ``token`` is still that of the state; return state, token and whether it was set."""
        found = self._plain.set_state(self._signature(state) + state, token)
        return found and (self._checked(found[0]), *found[1:])

    def _signature(self, state: bytes) -> bytes:
        return hmac.digest(self._key, self._run + b"\0" + state, "sha256")

    def _checked(self, signed: bytes) -> bytes:
        state = signed[_SIGNATURE:]
        if not hmac.compare_digest(signed[:_SIGNATURE], self._signature(state)):
            raise RendezvousStateError("the state at which nodes meet was not written by a node of this run")
        return state


def offer(key: bytes) -> str:
    """Let torchrun have it under the name that is returned."""
    rendezvous_handler_registry.register(_NAME, partial(_handler, key))
    return _NAME


def _handler(key: bytes, parameters: RendezvousParameters) -> RendezvousHandler:
    plain, store = create_backend(parameters)
    return create_handler(store, SignedBackend(plain, parameters.run_id, key), parameters)
