"""torchrun's agent on one node of a Ray cluster, started and outlived by the actor that holds the node's devices:
``python -m phalanx.launch.targets.ray_node RUNFILE PLACE``.

Its standard input is a pipe of that actor's, at whose end the agent ends at once, and the workers with it: whatever
becomes of the actor, nothing of the run stays on the node, a copy of the job's code included.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.launch.targets.launch_folder import run_from
from phalanx.launch.targets.node_agent import NodePlace, be_agent, meeting_options, worker_words
from phalanx.launch.targets.ray_code import ARCHIVE, RequestCode

# Until nothing is left: workers may still write there. What a shell has in the background reads nothing of its input.
_REMOVE = """exec 3<&0; { cat <&3; until rm -rf -- "$0"; do sleep 1; done; } &"""


def main(runfile: Path, told: str) -> int:
    """Be the agent of this node. Returns 0 where the run has ended, ``SAVED`` where it was asked to stop, else why not.

    ``told``: in JSON the node's ``name``, its ``rank`` among how many ``nodes``, its ``cores``, where
    agents ``meet``, what no other ``start`` has there, the ``code``, and a ``scratch`` folder of the actor's.
    """
    place = json.loads(told)
    _end_with_actor()
    _removed_after(Path(place["scratch"]))
    try:
        return _be_agent(runfile, place)
    except PhalanxError as error:
        print(f"{place['name']}: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def _be_agent(runfile: Path, place: dict[str, Any]) -> int:
    spec = run_from(runfile, "phalanx launch JOB --to ray")
    meets = meeting_options(place["meet"], start=place["start"], rank=place["rank"])
    node = NodePlace(
        name=place["name"],
        nodes=place["nodes"],
        cores=place["cores"],
        options={"max-restarts": str(spec.restarts), **meets},
    )
    code = RequestCode(**place["code"]).found(runfile.with_name(ARCHIVE), Path(place["scratch"]))
    if code.why:
        print(f"phalanx: {place['name']} works in a copy of the job's folder: {code.why}", flush=True)
    os.chdir(code.folder)
    return be_agent(spec, node, worker_words(runfile, runfile.parent, marked=False, job=code.job))


def _end_with_actor() -> None:
    life = os.dup(0)  # which workers do not inherit
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def wait() -> None:
        os.read(life, 1)
        for worker in _children():
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _removed_after(scratch: Path) -> int:
    """Have the folder removed when this process is gone, by whatever, Ray included: by one that is nobody's child.

    Returns the open end of a pipe, with which this process lives and which workers do not inherit.
    """
    ended, alive = os.pipe()
    words = ["sh", "-c", _REMOVE, str(scratch)]
    subprocess.run(
        words, stdin=ended, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, check=True
    )
    os.close(ended)
    return alive


def _children() -> list[int]:
    return [int(pid) for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
