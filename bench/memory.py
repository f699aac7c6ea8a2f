"""Bytes per parameter on one rank of four, under DDP and ZeRO 1, 2 and 3 with AdamW in fp32.

Two depths of the same stack differ by parameters alone, so the slope of peak memory over parameters is free of the
interpreter, torch itself, activations and communication buffers of fixed size. Theory (Rajbhandari et al. 2020,
section 3, without mixed precision): 4 for the parameter, 4 for its gradient, 8 for AdamW's two moments, each divided
by the ranks from the stage on that shards it.
"""

from __future__ import annotations

import statistics
import sys

from rich.console import Console
from rich.table import Table

from compare import Contender, alternate, rounds_from_command_line, train
from workloads import Stack

RANKS, STEPS = 4, 3
THEORY = {
    "dp=4": 4 + 4 + 8,
    "fsdp=4 zero=1 micro=1": 4 + 4 + 8 / RANKS,  # several micro-batches: with one it holds no more than zero=2
    "fsdp=4 zero=2": 4 + (4 + 8) / RANKS,
    "fsdp=4 zero=3": (4 + 4 + 8) / RANKS,
}
WITHIN = 0.10


def main() -> int:
    rounds = rounds_from_command_line(3)
    small, large = (sum(p.numel() for p in Stack(depth).parameters()) for depth in (8, 24))
    table = Table(title=f"memory of one rank of {RANKS}, AdamW (medians of {rounds} rounds)", title_justify="left")
    headings = (
        "plan",
        f"peak, {small / 1e6:.1f} M",
        f"peak, {large / 1e6:.1f} M",
        "bytes/parameter",
        "spread",
        "theory",
        "off by",
        "",
    )
    for heading in headings:
        table.add_column(heading)
    met = True
    for plan, theory in THEORY.items():
        sides = [Contender(name=job, run=train(job, plan, STEPS)) for job in ("stack_8", "stack_24")]
        results = alternate(sides, rounds, warm_up=0)
        low, high = (statistics.median(row[index]["peak_bytes"] for row in results) for index in range(2))
        slopes = [(row[1]["peak_bytes"] - row[0]["peak_bytes"]) / (large - small) for row in results]
        slope = statistics.median(slopes)
        good = abs(slope / theory - 1) <= WITHIN
        met = met and good
        sizes = [f"{value / 2**20:.0f} MiB" for value in (low, high)]
        table.add_row(
            *(plan, *sizes, f"{slope:.2f}", f"{min(slopes):.2f} to {max(slopes):.2f}"),
            *(f"{theory:.2f}", f"{slope / theory - 1:+.1%}", "met" if good else "MISSED"),
        )
    Console(width=120).print(table)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
