"""Strong scaling from 1 to 2 processes of one thread each: the same global batch, half of it on each.

Efficiency is (time of 1) / (2 x time of 2). The bar: 0.90 where raw DDP reaches it, and never below raw DDP.
"""

from __future__ import annotations

import statistics
import sys

from rich.console import Console
from rich.table import Table

from compare import Contender, alternate, rounds_from_command_line, script, train

STEPS = {"convnet": 40, "gpt": 15}
EFFICIENCY, NOISE = 0.90, 0.02  # two medians of the same program differ by about this much here


def main() -> int:
    rounds = rounds_from_command_line(5)
    table = Table(title=f"strong scaling, 1 -> 2 processes (medians of {rounds} rounds)", title_justify="left")
    for heading in ("workload", "who", "1 process", "2 processes", "efficiency", "spread", ""):
        table.add_column(heading)
    met = True
    for name, steps in STEPS.items():
        sides = [
            Contender(name="phalanx 1", run=train(name, "single", steps)),
            Contender(name="phalanx 2", run=train(name, "dp=2", steps)),
            Contender(name="loop 1", run=script("peers/loop.py", name, steps)),
            Contender(name="ddp 2", run=script("peers/ddp.py", name, steps, torchrun=2)),
        ]
        results = alternate(sides, rounds)
        loops = [statistics.median(row[index]["loop_s"] for row in results) for index in range(4)]
        each = [[row[one]["loop_s"] / (2 * row[one + 1]["loop_s"]) for row in results] for one in (0, 2)]
        ours, raw = (statistics.median(found) for found in each)
        spread = [f"{min(found):.3f} to {max(found):.3f}" for found in each]
        good = ours >= raw - NOISE and (ours >= EFFICIENCY or raw < EFFICIENCY)
        met = met and good
        table.add_row(
            *(name, "phalanx", f"{loops[0]:.4f} s", f"{loops[1]:.4f} s"),
            *(f"{ours:.3f}", spread[0], "met" if good else "MISSED"),
        )
        table.add_row("", "loop, raw DDP", f"{loops[2]:.4f} s", f"{loops[3]:.4f} s", f"{raw:.3f}", spread[1], "")
    Console(width=120).print(table)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
