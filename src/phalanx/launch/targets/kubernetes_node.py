"""torchrun's agent in one pod of a run on Kubernetes: ``python -m ... RUNFILE HOST:PORT NODES``.

The one place where a pod's environment variables are read. Agents meet in pod 0, and a pod's index is its node's rank.
Workers are not started again here: who has lost one leaves, and Kubernetes makes all pods anew. It does not where the
job's own code has raised what would come again, of which the exit code tells it.

Where the number of pods may change, ``2:8 SECONDS`` in place of ``8``, those that are there begin without the others
after as many seconds. One that comes later has all save and begin again with it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from phalanx.comm.roll_call import answers
from phalanx.config.run_files import EVENTS
from phalanx.events.log import EventReader, last_failure, own_failure
from phalanx.launch.addresses import LOOPBACK, own_address
from phalanx.launch.reaper import SAVED
from phalanx.launch.targets.kubernetes_manifest import MEETING_KEY, OWN_FAILURE, RESTART
from phalanx.launch.targets.kubernetes_options import on_most
from phalanx.launch.targets.launch_folder import FOLDER, run_from
from phalanx.launch.targets.node_agent import NodePlace, be_agent, meeting_options, worker_words
from phalanx.launch.targets.signed_meeting import offer

_PATIENCE = 3600  # seconds for all pods to be there: they are scheduled one by one
_LOOK = 1.0  # seconds between looks whether they are
_SAYS = 60.0  # seconds of silence before what is waited for is said
_LAST_LINES = 2.0  # seconds for what copies the workers' output
_LAST_WORD = 2.0  # seconds for the worker that says for all how they failed, perhaps on another pod


def main(runfile: Path, meeting: str, nodes: str, wait: str = "") -> int:
    """Be the agent of this pod.

    Returns 0 where the run has ended, ``SAVED`` where it was asked to stop, ``OWN_FAILURE`` where an exception of the
    job's own code has ended it, on whichever pod, else 1.

    ``nodes``: pods, ``8`` or ``2:8``; ``wait``: seconds that the fewest wait for the others.
    """
    signal.signal(signal.SIGTERM, _leave)  # a container's first process hears no signal that it does not handle
    spec = run_from(runfile, "phalanx launch JOB --to kubernetes")
    index = int(os.environ["JOB_COMPLETION_INDEX"])
    logs = spec.folder / FOLDER
    logs.mkdir(parents=True, exist_ok=True)
    events = EventReader(spec.folder / EVENTS)
    events.new()  # of earlier starts
    there = _is_known if index == 0 else answers  # pod 0 knows its own name a while after it has begun
    if not _wait_for(meeting, there):
        print(f"{socket.gethostname()}: nobody is at {meeting} after {_PATIENCE} s", file=sys.stderr)
        return 1
    if nodes.isdecimal():
        options = meeting_options(meeting, start=_start(meeting), rank=index, patience=_PATIENCE)
    else:
        options = _those_there(meeting, index, nodes, wait)
    place = NodePlace(
        name=socket.gethostname(),
        nodes=int(nodes.rpartition(":")[2]),
        cores=len(os.sched_getaffinity(0)),
        options={"max-restarts": "0", **options},
    )
    try:
        code = be_agent(on_most(spec), place, worker_words(runfile, logs, marked=True))
        return _failed(events) if code == 1 else code
    finally:
        _await_last_lines()


def _start(meeting: str) -> str:
    """What no other start of a run has."""
    return f"{meeting.rpartition(':')[0].partition('.')[0]}-{os.environ.get(RESTART) or '0'}"


def _those_there(meeting: str, index: int, nodes: str, wait: str) -> dict[str, str]:
    """Options with which those agents meet that are there after a while."""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # a pod that comes later is not told where a shared one is
    # A pod may know itself by another name than others do: neither who serves nor where is left to be guessed.
    meets = {"is_host": int(index == 0), "read_timeout": 60, "last_call_timeout": wait, "join_timeout": _PATIENCE}
    host = meeting.rpartition(":")[0]
    return {
        "rdzv-backend": offer(bytes.fromhex(os.environ.pop(MEETING_KEY))),
        "rdzv-endpoint": meeting,
        "rdzv-id": _start(meeting),
        "rdzv-conf": ",".join(f"{name}={value}" for name, value in meets.items()),
        "local-addr": own_address(host, one_host=host == LOOPBACK),
        "nnodes": nodes,
    }


def _leave(number: int, frame: object) -> None:
    """Before there are workers nothing is to be saved."""
    os._exit(SAVED)


def _wait_for(meeting: str, there: Callable[[str], bool]) -> bool:
    began = said = time.monotonic()
    while not there(meeting):
        now = time.monotonic()
        if now - began > _PATIENCE:
            return False
        if now - said > _SAYS:
            print(f"{socket.gethostname()}: waits for pod 0, at {meeting}", file=sys.stderr, flush=True)
            said = now
        time.sleep(_LOOK)
    return True


def _is_known(meeting: str) -> bool:
    try:
        return bool(socket.getaddrinfo(meeting.rpartition(":")[0], None))
    except OSError:
        return False


def _failed(events: EventReader) -> int:
    """Say why the run has failed, and return this pod's exit code.

    As the first pod ends all others are removed, and what they have printed with them: one may have had the only word.
    """
    told, until = events.new(), time.monotonic() + _LAST_WORD
    while not (failure := last_failure(told)) and time.monotonic() < until:
        time.sleep(0.05)
        told += events.new()
    if failure:
        print(f"{socket.gethostname()}: {failure['message']}", file=sys.stderr, flush=True)
    return OWN_FAILURE if own_failure(told) else 1


def _await_last_lines() -> None:
    """Wait for what still copies the output of workers that have ended: where this is the first process, it is ours."""
    until = time.monotonic() + _LAST_LINES
    while os.getpid() == 1 and time.monotonic() < until:
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.05)
        except ChildProcessError:
            return


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
