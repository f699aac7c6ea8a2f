"""Two hosts by SSH: from the command to the first step, against torchrun typed on both by somebody who is there.

``python bench/launch_hosts.py [--rounds N]``, as root: hosts are network namespaces of this machine, each with an SSH
server of its own. torchrun is started on each host directly, with nothing to connect first. The bar: at most 1.0 times
torchrun with what ``phalanx launch`` starts, ``phalanx worker``; a hand-written DDP script is shown beside.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from compare import (
    BENCH,
    PHALANX,
    PYTHON,
    Contender,
    Measures,
    alternate,
    environment,
    execute,
    rounds_from_command_line,
    show,
)

sys.path.insert(0, str(BENCH.parent / "tests" / "launch"))

from ssh_hosts import SshServers, lacking_for_ssh, ssh_servers

from phalanx.launch.reaper import fork

WORKLOAD, STEPS = "convnet", 3


def on_both(servers: SshServers, argv: Sequence[str], outputs: Path) -> float:
    """Run torchrun with ``argv`` on both hosts. Returns the Unix time of its start."""
    address, began, pids = servers.hosts.address(0), time.time(), list[int]()
    for number in range(2):
        pid = fork()
        if pid == 0:
            try:
                servers.hosts.enter(number)
                out = os.open(outputs / f"{number}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(out, 1)
                os.dup2(out, 2)
                os.chdir(BENCH)
                words = [PYTHON, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number)]
                words += ["--nproc-per-node", "1", "--master-addr", address, "--master-port", "29511", *argv]
                os.execve(PYTHON, words, environment())
            finally:
                os._exit(1)
        pids.append(pid)
    for pid in pids:  # whatever it gives: an agent that ends after the one that serves the store fails at its own end
        os.waitpid(pid, 0)
    return began


def first_step_of(folder: Path) -> float:
    """Unix time by the log of a run, which has to have come to its end."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "end", events[-1]
    return next(event["time"] for event in events if event["event"] == "step")


def main() -> int:
    if why := lacking_for_ssh():
        raise SystemExit(why)
    rounds = rounds_from_command_line(5)
    scratch = Path(tempfile.mkdtemp())
    job = f"{BENCH / 'jobs.py'}:{WORKLOAD}"

    with ssh_servers(2, scratch) as servers:
        variables = f'{{OMP_NUM_THREADS = "1", PYTHONPATH = "{environment()["PYTHONPATH"]}"}}'
        hosts = servers.write_hosts((1, 1), environment=variables)

        def launched() -> Measures:
            folder = Path(tempfile.mkdtemp(dir=scratch)) / "run"
            argv = [PHALANX, "launch", job, "--to", f"ssh:{hosts}", "--plan", "dp=2", "--steps", str(STEPS)]
            began, _, _ = execute([*argv, "--run", str(folder), "--no-check", "--quiet"])
            return {"first_step": first_step_of(folder) - began}

        def by_hand() -> Measures:
            folder = Path(tempfile.mkdtemp(dir=scratch))
            runfile = folder / "run.toml"
            runfile.write_text(
                f'job = "{job}"\nplan = "dp=2"\nfolder = "{folder / "run"}"\nsteps = {STEPS}\nforecast = "none"\n'
            )
            began = on_both(servers, ["--no-python", PHALANX, "worker", str(runfile)], folder)
            return {"first_step": first_step_of(folder / "run") - began}

        def ddp() -> Measures:
            folder = Path(tempfile.mkdtemp(dir=scratch))
            began = on_both(servers, ["peers/ddp.py", WORKLOAD, str(STEPS)], folder)
            report = next(line for line in (folder / "0.out").read_text().splitlines() if line.startswith("{"))
            return {"first_step": json.loads(report)["first_step"] - began}

        contenders = [
            Contender(name="phalanx launch --to ssh", run=launched),
            Contender(name="torchrun on both, phalanx worker", run=by_hand, bar=1.0),
            Contender(name="torchrun on both, hand-written DDP", run=ddp),
        ]
        results = alternate(contenders, rounds)
    return 0 if show("command to first step, 2 hosts", contenders, results, "first_step") else 1


if __name__ == "__main__":
    sys.exit(main())
