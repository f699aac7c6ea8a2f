"""A model whose parameters, gradients and AdamW state take twice what one process may have: pp=4 trains it.

The limit is the kernel's, on each process by itself (RLIMIT_DATA: private memory that can be written to, which is all
but the program and its libraries). The launcher and every worker are under it from their first instruction, so that
building the model has to fit too. Under the same limit one device must fail, or the limit would show nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from compare import BENCH, PHALANX, environment
from workloads import WORKLOADS

LIMIT, STEPS, TIMES = 2**30, 2, 2.0
PLAN = "pp=4 micro=1"


def main() -> int:
    needs = 16 * sum(tensor.numel() for tensor in WORKLOADS["gpt-limit"].model().parameters())
    print(f"model with gradients and AdamW: {needs / LIMIT:.2f} x the limit of {LIMIT / 2**20:.0f} MiB a process")
    status, said, _ = under_limit("single")
    alone = status != 0 and "alloc" in said
    why = next((line for line in said.splitlines() if "alloc" in line), said)
    print(f"single: exit code {status}, {'as it must' if alone else 'NOT for want of memory'}: {why.strip()}")
    status, said, events = under_limit(PLAN)
    peaks = [event["peak_bytes"] for event in events if event["event"] == "memory"]
    losses = [event["loss"] for event in events if event["event"] == "step"]
    trained = status == 0 and len(losses) == STEPS and max(peaks) <= LIMIT
    print(f"{PLAN}: exit code {status}, losses {losses}, peak resident MiB {[round(peak / 2**20) for peak in peaks]}")
    if not trained:
        print(said)
    met = alone and trained and needs >= TIMES * LIMIT
    print("met" if met else "MISSED")
    return 0 if met else 1


def under_limit(plan: str) -> tuple[int, str, list[dict[str, object]]]:
    """Train under the limit: exit code, what was said, the run's events."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        train = [PHALANX, "train", f"{BENCH / 'jobs.py'}:gpt_limit", "--plan", plan, "--steps", str(STEPS)]
        argv = ["prlimit", f"--data={LIMIT}", *train, "--run", str(folder)]
        done = subprocess.run(argv, env=environment(), cwd=BENCH, capture_output=True, text=True, check=False)
        log = folder / "events.jsonl"
        events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return done.returncode, done.stdout + done.stderr, events


if __name__ == "__main__":
    sys.exit(main())
