"""torchrun's agent on one node of a Slurm job: ``srun python -m phalanx.launch.targets.slurm_node RUNFILE HOST:PORT``.

The one place where Slurm's environment variables are read. The agent starts the workers of its node, one a device, and
agents meet on the first node. What a rank prints goes where srun's does, and into ``rank-N.log`` beside the run file.

srun passes a signal on to every process of the step, those that load data and those that only wait too, and takes
SIGTERM as an order to end all by force. So the word to save is SIGUSR1, which the agent alone hears: it has torchrun
stop its workers as SIGTERM does.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

from phalanx.config import RunSpec
from phalanx.errors import SpecError
from phalanx.events.log import read
from phalanx.files import read_text
from phalanx.launch.addresses import own_address
from phalanx.launch.reaper import SAVED

_WORDS = ("start", "resume", "stopped", "error", "end")
_OLDER_GRACE = 30  # seconds, before torch 2.13
_AFTER_GRACE = 5  # seconds, after which a worker that should have ended by itself is ended by force
# Nothing but the end of what is printed ends the process that copies it.
_WORKER = """exec "$0" -m phalanx worker "$1" > >(trap '' INT TERM; exec tee -a -- "$2/rank-$RANK.log") 2>&1"""


def main(runfile: Path, meeting: str) -> int:
    """Be the agent of this node. Returns 0 where the run has ended, ``SAVED`` where it was asked to stop, else 1."""
    _only_this_process_hears(signal.SIGUSR1)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # of this process: agents lose each other's store as they end
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig
    from torch.distributed.run import parse_args, run

    del os.environ["TORCH_CPP_LOG_LEVEL"]
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    spec = RunSpec.from_toml(read_text(runfile, where="run file", fix="phalanx launch JOB --to slurm", below=0))
    nodes = int(os.environ["SLURM_NNODES"])
    workers = spec.plan.processes // nodes
    _share_cores(workers)
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(math.ceil(spec.grace) + _AFTER_GRACE)
    if spec.grace > _OLDER_GRACE and not hasattr(LaunchConfig, "shutdown_timeout"):
        what = f"this torch ends workers after {_OLDER_GRACE} seconds, whatever grace is: 2.13 does not"
        print(f"{os.environ['SLURMD_NODENAME']}: {what}", file=sys.stderr)
    os.environ["PYTHONUNBUFFERED"] = "1"  # what is printed goes into a pipe, and would be lost with the worker
    try:
        run(parse_args([*_agent_options(spec, meeting, nodes, workers), *_worker(runfile)]))
    except SignalException:
        return 0 if last_word(spec.folder) == "end" else SAVED
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"{os.environ['SLURMD_NODENAME']}: rank {rank} ended with {failure.exitcode}", file=sys.stderr)
        return 1
    return 0


def last_word(folder: Path) -> str:
    """The last of a run's events that says how it stands: ``start``, ``resume``, ``stopped``, ``error`` or ``end``."""
    word = ""
    with suppress(SpecError):
        for event in read(folder / "events.jsonl"):
            word = event["event"] if event["event"] in _WORDS else word
    return word


def _agent_options(spec: RunSpec, meeting: str, nodes: int, workers: int) -> list[str]:
    start = f"{os.environ['SLURM_JOB_ID']}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    first = os.environ["SLURM_NODEID"] == "0"
    options = {
        "nnodes": str(nodes),
        "nproc-per-node": str(workers),
        "max-restarts": str(spec.restarts),
        "rdzv-backend": "c10d",
        "rdzv-endpoint": meeting,
        "rdzv-id": start,
        # A node may know itself by another name than others do: neither who serves nor where is left to be guessed.
        "rdzv-conf": f"is_host={int(first)}",
        "local-addr": own_address(meeting.rpartition(":")[0], one_host=False),
    }
    return [*(word for name, value in options.items() for word in (f"--{name}", value)), "--no-python"]


def _worker(runfile: Path) -> list[str]:
    return ["bash", "-c", _WORKER, sys.executable, str(runfile), str(runfile.parent)]


def _share_cores(workers: int) -> None:
    told = os.environ.get("SLURM_CPUS_ON_NODE", "")
    cores = int(told) if told.isdecimal() else workers
    if cores < workers:
        what = f"{cores} cores for {workers} workers: --cpus-per-task {workers} gives each its own"
        print(f"{os.environ['SLURMD_NODENAME']}: {what}", file=sys.stderr)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // workers)))


def _only_this_process_hears(number: signal.Signals) -> None:
    """A thread of this process waits for the signal; what is started from here on has it blocked."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])

    def wait() -> None:
        signal.sigwait([number])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
