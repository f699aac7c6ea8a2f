"""torchrun's agent on one node of a Slurm job: ``srun python -m phalanx.launch.targets.slurm_node RUNFILE HOST:PORT``.

The one place where Slurm's environment variables are read. Agents meet on the first node.

srun passes a signal on to every process of the step, those that load data and those that only wait too, and takes
SIGTERM as an order to end all by force. So the word to save is SIGUSR1, which the agent alone hears: it has torchrun
stop its workers as SIGTERM does.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from phalanx.launch.targets.launch_folder import run_from
from phalanx.launch.targets.node_agent import NodePlace, be_agent, meeting_options, worker_words


def main(runfile: Path, meeting: str) -> int:
    """Be the agent of this node. Returns 0 where the run has ended, ``SAVED`` where it was asked to stop, else 1."""
    _only_this_process_hears(signal.SIGUSR1)
    spec = run_from(runfile, "phalanx launch JOB --to slurm")
    name, nodes = os.environ["SLURMD_NODENAME"], int(os.environ["SLURM_NNODES"])
    start = f"{os.environ['SLURM_JOB_ID']}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    meets = meeting_options(meeting, start=start, rank=int(os.environ["SLURM_PROCID"]))  # a task a node
    place = NodePlace(
        name=name,
        nodes=nodes,
        cores=_cores(name, spec.plan.processes // nodes),
        options={"max-restarts": str(spec.restarts), **meets},
    )
    return be_agent(spec, place, worker_words(runfile, runfile.parent, marked=False))


def _cores(name: str, workers: int) -> int:
    told = os.environ.get("SLURM_CPUS_ON_NODE", "")
    cores = int(told) if told.isdecimal() else workers
    if cores < workers:
        what = f"{cores} cores for {workers} workers: --cpus-per-task {workers} gives each its own"
        print(f"{name}: {what}", file=sys.stderr)
    return cores


def _only_this_process_hears(number: signal.Signals) -> None:
    """A thread of this process waits for the signal; what is started from here on has it blocked."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])

    def wait() -> None:
        signal.sigwait([number])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
