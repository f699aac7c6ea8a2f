"""How long a run stands when a worker is killed: from ``kill -9`` to the next step that is completed, two processes.

Both sides train the same small GPT, save every 10 steps and lose rank 1 as it begins the step 15. Torchrun's side is
what its users write: a script that loads the newest checkpoint as it starts, under ``--max-restarts``, with a store of
its own for each start: in the shared one that is the default, workers may meet the addresses of those that died, and
wait for them for half an hour. Counted besides are the steps that had been finished and are computed again.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import phalanx as px
from compare import BENCH, PHALANX, PYTHON, Contender, Measures, alternate, execute, rounds_from_command_line, show
from jobs import gpt as small_gpt

STEPS, SAVE_EVERY, STRUCK_AT = 20, 10, 15
BAR = 3.0  # seconds
SCRATCH = "RESTART_SCRATCH"


def strike(begun: int) -> None:
    """End this process by SIGKILL if it is rank 1, begins the step 15 and is the first to; it notes when."""
    note = Path(os.environ[SCRATCH]) / "killed"
    if begun == STRUCK_AT and dist.get_rank() == 1 and not note.exists():
        note.write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)


def gpt() -> px.Job:
    """The small GPT; rank 1 is killed in its step 15, once."""
    given, begun = small_gpt(), [0]

    def loss(output: Any, batch: Any) -> Any:
        if torch.is_grad_enabled() and dist.is_initialized() and dist.get_backend() != "fake":
            strike(begun[0])
            begun[0] += 1
        return given.loss(output, batch)

    return replace(given, loss=loss, epochs=None, steps=STEPS)


def ours() -> Measures:
    """``phalanx train``: what its event log says."""

    def run(scratch: Path) -> list[float]:
        argv = [PHALANX, "train", f"{BENCH / 'restart.py'}:gpt", "--plan", "dp=2", "--run", str(scratch / "run")]
        execute([*argv, "--checkpoint-every", str(SAVE_EVERY), "--quiet"])
        events = [json.loads(line) for line in (scratch / "run" / "events.jsonl").read_text().splitlines()]
        again[:] = [event["again"] for event in events if event["event"] == "restart"]
        return [event["time"] for event in events if event["event"] == "step"]

    again = list[int]()
    return {**_stood(run), "again": float(sum(again))}


def torchruns() -> Measures:
    """Torchrun with a script that resumes: what rank 0 notes as each step ends."""

    def run(scratch: Path) -> list[float]:
        torchrun = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "3"]
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        execute([*torchrun, str(BENCH / "peers" / "resumed_ddp.py"), "gpt", str(STEPS), str(SAVE_EVERY)])
        return [float(line) for line in (scratch / "steps").read_text().splitlines()]

    return {**_stood(run), "again": float(STRUCK_AT - STRUCK_AT // SAVE_EVERY * SAVE_EVERY)}


def _stood(run: Callable[[Path], list[float]]) -> Measures:
    """Seconds from the kill to the end of the first step after it; those before it are as many as its number."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[SCRATCH] = folder
        ends = run(Path(folder))
        killed = float((Path(folder) / "killed").read_text())
    return {"stood": ends[STRUCK_AT] - killed}


def main() -> int:
    """Compare, and say whether both bars are met."""
    rounds = rounds_from_command_line(5)
    contenders = [
        Contender(name="phalanx train --plan dp=2", run=ours),
        Contender(name="torchrun --max-restarts, hand-written DDP and resume", run=torchruns, bar=0.4),
    ]
    results = alternate(contenders, rounds)
    met = show("worker killed to next completed step, 2 processes, small GPT", contenders, results, "stood")
    for index, contender in enumerate(contenders):
        print(f"{contender.name}: {statistics.median(row[index]['again'] for row in results):g} steps computed again")
    seconds = statistics.median(row[0]["stood"] for row in results)
    print(f"phalanx stood for {seconds:.2f} s   bar <= {BAR} s   {'met' if seconds <= BAR else 'MISSED'}")
    return 0 if met and seconds <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
