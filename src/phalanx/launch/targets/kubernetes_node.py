"""torchrun's agent in one pod of a run on Kubernetes: ``python -m ... RUNFILE HOST:PORT NODES``.

The one reader of a pod's environment variables. Agents meet in pod 0, and a pod's index is its node's rank. Workers are
not restarted here: a pod that has lost one ends, and Kubernetes makes all pods anew, unless the exit code says that the
job's own code has raised an exception.

If the number of pods may change, ``2:8 SECONDS`` in place of ``8``, torchelastic starts with those there after so many
seconds. A later pod has all save and restart with it. torch keeps the state of such a rendezvous as a pickle, in a
store that anybody who reaches its port can write. So an HMAC-SHA256 precedes it, and is checked before torch reads it.
"""

from __future__ import annotations

import hmac
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import final

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStateError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler

from phalanx.comm.roll_call import answers
from phalanx.config.run_files import EVENTS
from phalanx.events.log import EventReader, last_failure, own_failure
from phalanx.launch.addresses import LOOPBACK, own_address
from phalanx.launch.reaper import SAVED, await_orphans
from phalanx.launch.targets.kubernetes_manifest import CORES, MEETING_KEY, OWN_FAILURE, RESTART, on_most
from phalanx.launch.targets.launch_folder import FOLDER, run_from
from phalanx.launch.targets.node_agent import NodePlace, be_agent, meeting_options, worker_words

_PATIENCE = 3600  # seconds for all pods, which are scheduled one by one
_LOOK = 1.0  # seconds between looks
_LAST_LINES = 2.0  # seconds for the processes that copy the workers' output
_LAST_WORD = 2.0  # seconds for the worker, perhaps in another pod, that writes the run's failure
_SIGNED = "phalanx-signed"
_SIGNATURE = 32  # bytes


def main(runfile: Path, meeting: str, nodes: str, wait: str = "") -> int:
    """Run the agent of this pod; ``nodes``: ``8`` or ``2:8``; ``wait``: seconds that the fewest wait for others.

    Returns 0 if the run has ended, ``SAVED`` if it was asked to stop, ``OWN_FAILURE`` if an exception of the job's own
    code has ended it in any pod, else 1.
    """
    signal.signal(signal.SIGTERM, _leave)  # a container's first process hears no signal that it does not handle
    spec = run_from(runfile, "phalanx launch JOB --to kubernetes")
    index = int(os.environ["JOB_COMPLETION_INDEX"])
    logs = spec.folder / FOLDER
    logs.mkdir(parents=True, exist_ok=True)
    events = EventReader(spec.folder / EVENTS)
    events.new()  # of earlier starts
    if not _found(meeting, index):
        print(f"{socket.gethostname()}: nobody is at {meeting} after {_PATIENCE} s", file=sys.stderr)
        return 1
    start = f"{meeting.rpartition(':')[0].partition('.')[0]}-{os.environ.get(RESTART) or '0'}"
    options = meeting_options(meeting, start=start, rank=index, patience=_PATIENCE)
    if not nodes.isdecimal():
        options = _elastic_options(meeting, start, index, nodes, wait)
    place = NodePlace(
        name=socket.gethostname(),
        nodes=int(nodes.rpartition(":")[2]),
        cores=int(os.environ.get(CORES, "0")) or len(os.sched_getaffinity(0)),
        options={"max-restarts": "0", **options},
    )
    try:
        code = be_agent(on_most(spec), place, worker_words(runfile, logs, marked=True))
        return _failed(events) if code == 1 else code
    finally:
        if os.getpid() == 1:  # of a container, which ends with this process
            await_orphans(_LAST_LINES)


def _elastic_options(meeting: str, start: str, index: int, nodes: str, wait: str) -> dict[str, str]:
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # a later pod is not told where a shared store is
    rendezvous_handler_registry.register(_SIGNED, partial(_handler, bytes.fromhex(os.environ.pop(MEETING_KEY))))
    # is_host and local-addr: a pod may know itself by another name than others do
    conf = {"is_host": int(index == 0), "read_timeout": 60, "last_call_timeout": wait, "join_timeout": _PATIENCE}
    host = meeting.rpartition(":")[0]
    return {
        "rdzv-backend": _SIGNED,
        "rdzv-endpoint": meeting,
        "rdzv-id": start,
        "rdzv-conf": ",".join(f"{name}={value}" for name, value in conf.items()),
        "local-addr": own_address(host, one_host=host == LOOPBACK),
        "nnodes": nodes,
    }


def _leave(number: int, frame: object) -> None:
    """End at once: before there are workers nothing has to be saved."""
    os._exit(SAVED)


def _found(meeting: str, index: int) -> bool:
    """Wait until pod 0 listens; pod 0 itself until it knows its own name, which is a while after it has begun."""
    until = time.monotonic() + _PATIENCE
    print(f"{socket.gethostname()}: waits for pod 0, at {meeting}", file=sys.stderr, flush=True)
    while time.monotonic() < until:
        with suppress(OSError):
            if answers(meeting) or (index == 0 and socket.getaddrinfo(meeting.rpartition(":")[0], None)):
                return True
        time.sleep(_LOOK)
    return False


def _failed(events: EventReader) -> int:
    """Print the run's failure, and return this pod's exit code; with the first pod all others are removed."""
    told, until = events.new(), time.monotonic() + _LAST_WORD
    while not (failure := last_failure(told)) and time.monotonic() < until:
        time.sleep(0.05)
        told += events.new()
    if failure:
        print(f"{socket.gethostname()}: {failure['message']}", file=sys.stderr, flush=True)
    return OWN_FAILURE if own_failure(told) else 1


@final
class SignedBackend(RendezvousBackend):
    """A rendezvous backend that signs the state of ``plain`` with ``key``, for ``run_id`` alone."""

    def __init__(self, plain: RendezvousBackend, run_id: str, key: bytes) -> None:
        self._plain, self._run, self._key = plain, run_id.encode(), key

    @property
    def name(self) -> str:
        return _SIGNED

    def get_state(self) -> tuple[bytes, Token] | None:
        """
        Raises:
            RendezvousStateError: the state was not signed with the key.
        """
        found = self._plain.get_state()
        return found and (self._checked(found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        found = self._plain.set_state(self._signature(state) + state, token)
        return found and (self._checked(found[0]), *found[1:])

    def _signature(self, state: bytes) -> bytes:
        return hmac.digest(self._key, self._run + b"\0" + state, "sha256")

    def _checked(self, signed: bytes) -> bytes:
        state = signed[_SIGNATURE:]
        if not hmac.compare_digest(signed[:_SIGNATURE], self._signature(state)):
            raise RendezvousStateError("the state at which nodes meet was not written by a node of this run")
        return state


def _handler(key: bytes, parameters: RendezvousParameters) -> RendezvousHandler:
    plain, store = create_backend(parameters)
    return create_handler(store, SignedBackend(plain, parameters.run_id, key), parameters)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
