"""torchrun's agent on one node of a Ray cluster, started and outlived by the actor that holds the node's devices:
``python -m phalanx.launch.targets.ray_node RUNFILE PLACE``.

Its standard input is a pipe of that actor's, at whose end the agent ends at once, and the workers with it: whatever
becomes of the actor, nothing of the run stays on the node.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

from phalanx.config import RunSpec
from phalanx.files import read_text
from phalanx.launch.targets.node_agent import NodePlace, be_agent, meeting_options, worker_words


def main(runfile: Path, told: str) -> int:
    """Be the agent of this node. Returns 0 where the run has ended, ``SAVED`` where it was asked to stop, else 1.

    ``told``: in JSON the node's ``name``, whether it is the ``first`` of how many ``nodes``, its ``cores``, where
    agents ``meet``, and what no other ``start`` has there.
    """
    _end_with_actor()
    place = json.loads(told)
    spec = RunSpec.from_toml(read_text(runfile, where="run file", fix="phalanx launch JOB --to ray", below=0))
    meets = meeting_options(place["meet"], start=place["start"], first=place["first"])
    node = NodePlace(
        name=place["name"],
        nodes=place["nodes"],
        cores=place["cores"],
        options={"max-restarts": str(spec.restarts), **meets},
    )
    return be_agent(spec, node, worker_words(runfile, runfile.parent, marked=False))


def _end_with_actor() -> None:
    life = os.dup(0)  # which workers do not inherit
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def wait() -> None:
        os.read(life, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
