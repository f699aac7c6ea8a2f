"""torchrun's meeting point where all workers are on this machine: a store on loopback.

torchrun's own, with ``--standalone`` too, listens on every address of the machine, and takes what anybody writes.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import final

from torch.distributed import PrefixStore, TCPStore  # pyrefly: ignore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from phalanx.launch.addresses import LOOPBACK

BACKEND = "phalanx-one-host"
"""What torchrun calls it, once ``offer`` has been called."""


@final
class OneHost(RendezvousHandler):
    """One agent, which is there already."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        listener = socket.create_server((LOOPBACK, 0), backlog=128)
        self._run, self._round, self._closed = parameters.run_id, 0, False
        self._port: int = listener.getsockname()[1]
        self._store = TCPStore(
            LOOPBACK,
            self._port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(minutes=10),
            master_listen_fd=listener.detach(),
        )

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._round += 1
        store = PrefixStore(f"agent/{self._round}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._port))

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run

    def shutdown(self) -> bool:
        self._closed = True
        return True


def offer() -> None:
    """Let torchrun find it by ``BACKEND``."""
    rendezvous_handler_registry.register(BACKEND, OneHost)
