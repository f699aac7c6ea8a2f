"""How long ``phalanx check`` takes to look at eight hosts before a run, from the command to its table.

``python bench/check_eight.py [--rounds N]``, as root: hosts are network namespaces of this machine, each with an SSH
server of its own, so that all eight share its cores; eight machines have their own. The bar: 60 s, the slowest round.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from compare import BENCH, PHALANX, environment, execute, rounds_from_command_line

sys.path.insert(0, str(BENCH.parent / "tests" / "launch"))

from ssh_hosts import lacking_for_ssh, ssh_servers

HOSTS, WORKLOAD, BAR = 8, "convnet", 60.0  # hosts; the job that is looked at; seconds


def main() -> int:
    if why := lacking_for_ssh():
        raise SystemExit(why)
    rounds = rounds_from_command_line(3)
    scratch = Path(tempfile.mkdtemp())
    walls: list[float] = []
    with ssh_servers(HOSTS, scratch) as servers:
        variables = f'{{OMP_NUM_THREADS = "1", PYTHONPATH = "{environment()["PYTHONPATH"]}"}}'
        file = servers.write_hosts((1,) * HOSTS, environment=variables)
        words = ["check", f"{BENCH / 'jobs.py'}:{WORKLOAD}", "--to", f"ssh:{file}", "--plan", f"dp={HOSTS}"]
        for _ in range(rounds):
            _, wall, out = execute([PHALANX, *words, "--run", str(scratch / "run"), "--json"])
            told = json.loads(out)
            assert len(told["hosts"]) == HOSTS, told
            walls.append(wall)
            print(f"{wall:6.1f} s  {HOSTS} hosts, {len(told['findings'])} findings", flush=True)
    met = max(walls) <= BAR
    print(f"phalanx check on {HOSTS} hosts  median {statistics.median(walls):.1f} s, slowest {max(walls):.1f} s")
    print(f"bar <= {BAR:g} s: {'met' if met else 'missed'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
