"""torchrun's agent on one host of a launch by SSH: ``python -m phalanx.launch.targets.ssh_node``.

Its standard input is the connection to the launcher. The first line is the place of the host in the run, as JSON.
``stop`` asks the run to save and stop, ``end`` kills the workers, and any other line says that the launcher is alive.
When the input closes or is silent for ``SILENCE``, the run saves and stops: no worker outlives its launcher.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.launch.reaper import kill_group
from phalanx.launch.targets.launch_folder import run_from
from phalanx.launch.targets.node_agent import NodePlace, be_agent, meeting_options, worker_words

SILENCE = 60.0  # seconds without a word of the launcher


def main() -> int:
    """Be the agent of this host. Return 0 at the run's end, ``SAVED`` after a stop request, else another code."""
    with open(0, "rb", 0, closefd=False) as stdin:  # unbuffered: the rest is for the thread
        place = json.loads(stdin.readline())
    _listen_to_launcher()
    try:
        return _be_agent(place)
    except PhalanxError as error:
        print(f"{place['name']}: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def _be_agent(place: dict[str, Any]) -> int:
    runfile = Path(place["runfile"])
    spec = run_from(runfile, "phalanx launch JOB --to ssh:hosts.toml")
    os.chdir(place["folder"])
    node = NodePlace(
        name=place["name"],
        nodes=place["nodes"],
        cores=len(os.sched_getaffinity(0)),
        options={"max-restarts": "0", **meeting_options(place["meet"], start=place["start"], rank=place["rank"])},
        workers=place["workers"],
    )
    return be_agent(spec, node, worker_words(runfile, runfile.parent, marked=True))


def _listen_to_launcher() -> None:
    life = os.dup(0)  # workers do not inherit it
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    threading.Thread(target=_listen, args=(life,), daemon=True).start()


def _listen(life: int) -> None:
    asked = False
    while True:
        heard = os.read(life, 4096) if select.select([life], [], [], SILENCE)[0] else b""
        if b"end" in heard:
            for worker in _children():
                kill_group(worker, signal.SIGKILL)
            os._exit(1)
        if not asked and (b"stop" in heard or not heard):
            asked = True  # a second signal would cut short torchrun's wait for the workers
            os.kill(os.getpid(), signal.SIGTERM)
        if not heard:
            return


def _children() -> list[int]:
    found: list[int] = []
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended meanwhile
            found += map(int, task.read_text().split())
    return found


if __name__ == "__main__":
    sys.exit(main())
