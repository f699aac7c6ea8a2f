"""torchrun's agent on one node of a Slurm job: ``srun python -m phalanx.launch.targets.slurm_node RUNFILE HOST:PORT``.

The one reader of Slurm's environment variables. Agents meet on the first node. srun sends a signal to every process of
the step, and takes SIGTERM as an order to kill all. So SIGUSR1 asks to save: only the agent hears it, and has torchrun
stop its workers as by SIGTERM.
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
    """Run the agent of this node. Returns 0 if the run has ended, ``SAVED`` if it was asked to stop, else 1."""
    _stop_by(signal.SIGUSR1)
    spec = run_from(runfile, "phalanx launch JOB --to slurm")
    name, nodes = os.environ["SLURMD_NODENAME"], int(os.environ["SLURM_NNODES"])
    start = f"{os.environ['SLURM_JOB_ID']}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    meets = meeting_options(meeting, start=start, rank=int(os.environ["SLURM_PROCID"]))  # one task a node
    workers, cores = spec.plan.processes // nodes, os.environ.get("SLURM_CPUS_ON_NODE", "")
    count = int(cores) if cores.isdecimal() else workers
    place = NodePlace(name=name, nodes=nodes, cores=count, options={"max-restarts": str(spec.restarts), **meets})
    return be_agent(spec, place, worker_words(runfile, runfile.parent, marked=False))


def _stop_by(number: signal.Signals) -> None:
    """Let the first such signal become SIGTERM; processes that this one starts have the signal blocked."""
    asked = threading.Event()

    def stop(*_: object) -> None:
        if not asked.is_set():
            asked.set()
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(number, stop)  # threads of libraries that are loaded already do not have it blocked
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    threading.Thread(target=lambda: stop(signal.sigwait([number])), daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
