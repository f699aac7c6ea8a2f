"""torchrun's agent on one node of a run that a queue or ssh has started; the same for all targets.

The agent starts the workers of its node, one a device, passes SIGTERM on to them and waits until they have saved. The
output of a rank goes to the agent's own output, and into ``rank-N.log``. A queue with its own rendezvous or signal to
stop has a file that calls ``be_agent``; the script of another runs this file, with what its variables say of the nodes.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.config import RunSpec
from phalanx.config.run_files import EVENTS, RUN_TOML
from phalanx.device_kinds import kind_for
from phalanx.errors import SpecError
from phalanx.events.log import EventReader, Outcome, outcome_of
from phalanx.files import replace_text
from phalanx.launch.reaper import SAVED
from phalanx.launch.runfile import absolute
from phalanx.launch.targets.launch_folder import FOLDER
from phalanx.launch.torchrun import AGENT

_OLDER_GRACE = 30  # seconds, before torch 2.13
_AFTER_GRACE = 5  # seconds, after which a worker that should have ended by itself is ended by force
_WORKER = """exec "$0" -m phalanx worker "$1" ${3:+--job "$3"} """
# The processes that copy output end with that output, and by no signal.
_PLAIN = _WORKER + """> >(trap '' INT TERM; exec tee -a -- "$2/rank-$RANK.log") 2>&1"""
_MARKED = (
    f"{_WORKER}> >(trap '' INT TERM; "
    """tee -a -- "$2/rank-$RANK.log" | exec sed -u "s/^/[rank $RANK] /") 2>&1"""
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlace:
    """One node of a run.

    Attributes:
        name: in messages.
        nodes: of the run.
        cores: for the workers of this node.
        workers: on this node; 0: each node has the same number.
        options: of torchrun, by their names without dashes: rendezvous and restarts.
    """

    name: str
    nodes: int
    cores: int
    options: Mapping[str, str]
    workers: int = 0


def meeting_options(meeting: str, *, start: str, rank: int, patience: int = 600) -> dict[str, str]:
    """Return options with which the agents of a fixed number of nodes meet at ``meeting`` (``host:port``) of rank 0.

    torchrun's static rendezvous reads JSON from its store; ``c10d`` reads pickles, which anybody may put there.

    ``start``: identifies this start of the run. ``patience``: seconds for all nodes to join.
    """
    return {
        "rdzv-backend": "static",
        "rdzv-endpoint": meeting,
        "rdzv-id": start,
        "rdzv-conf": f"timeout={patience}",
        "node-rank": str(rank),
    }


def worker_words(runfile: Path, logs: Path, *, marked: bool, job: str = "") -> list[str]:
    """Return the command of each worker, whose ``rank-N.log`` is in ``logs``.

    ``marked``: True to begin each line of the agent's output with the rank. ``job``: path of the job on this node, if
    another than in the run file.
    """
    script = _MARKED if marked else _PLAIN
    return ["bash", "-c", script, sys.executable, str(runfile), str(logs), *([job] if job else [])]


def be_agent(spec: RunSpec, place: NodePlace, worker: Sequence[str]) -> int:
    """Run the agent of this node, until its workers end or SIGTERM asks this process to stop.

    Returns 0 if the run has ended, ``SAVED`` if it was asked to stop, else 1.
    """
    events = EventReader(spec.folder / EVENTS)
    _outcome(events)  # of earlier starts
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # of this process: agents lose each other's store as they end
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig
    from torch.distributed.run import parse_args, run

    del os.environ["TORCH_CPP_LOG_LEVEL"]
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # each has a level of its own
    workers = place.workers or spec.plan.processes // place.nodes
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, place.cores // workers)))
    kind_for(spec.plan.device, workers * spec.plan.threads).before_workers(place.nodes, workers)
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(math.ceil(spec.grace) + _AFTER_GRACE)
    if spec.grace > _OLDER_GRACE and not hasattr(LaunchConfig, "shutdown_timeout"):
        said = f"this torch ends workers after {_OLDER_GRACE} seconds, whatever grace is: 2.13 does not"
        print(f"{place.name}: {said}", file=sys.stderr)
    os.environ[AGENT] = str(os.getpid())
    os.environ["PYTHONUNBUFFERED"] = "1"  # output goes into a pipe, and would be lost with the worker
    options = {"nnodes": str(place.nodes), "nproc-per-node": str(workers), **place.options}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    try:
        run(parse_args([*words, "--no-python", *worker]))
        return 0
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == SAVED:  # another node was asked to stop, and all have saved
            return SAVED
        print(f"{place.name}: rank {rank} ended with {failure.exitcode}", file=sys.stderr, flush=True)
        return 1
    except SignalException:
        return {"ended": 0, "failed": 1}.get(_outcome(events), SAVED)
    except Exception:  # the rendezvous is gone with the agent of another node, perhaps one that was asked to stop
        if _outcome(events) == "stopped":
            return SAVED
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torch's handler would raise in the caller


def _outcome(events: EventReader) -> Outcome:
    """Return the outcome that the events since the last call tell."""
    with suppress(SpecError):
        return outcome_of(events.new())
    return ""


def main(hosts: str, rank: str, port: str, start: str) -> int:
    """Run the agent of node ``rank`` of ``hosts``, separated by blanks, for the run file in standard input.

    ``port``: of the first host, at which agents meet. A relative run folder is below the home folder, a relative job
    below the working directory. Returns as ``be_agent`` does.
    """
    given, names = RunSpec.from_toml(sys.stdin.read()), hosts.split()
    run = absolute(replace(given, folder=Path.home() / given.folder))
    (logs := run.folder / FOLDER).mkdir(parents=True, exist_ok=True)
    replace_text(logs / RUN_TOML, run.to_toml())
    meets = meeting_options(f"{names[0]}:{port}", start=start, rank=int(rank))
    options, cores = {"max-restarts": str(run.restarts), **meets}, len(os.sched_getaffinity(0))
    place = NodePlace(name=names[int(rank)], nodes=len(names), cores=cores, options=options)
    return be_agent(run, place, worker_words(logs / RUN_TOML, logs, marked=True))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
