"""Our side of the one-process comparison, with the loop left to the user. Usage: ours.py WORKLOAD STEPS."""

from __future__ import annotations

import sys
from dataclasses import replace

import jobs
import phalanx as px
from stopwatch import Stopwatch


def main(name: str, steps: int) -> None:
    watch = Stopwatch()
    step, loader = px.build(replace(getattr(jobs, name)(), epochs=None, steps=steps), px.Plan())
    for batch in loader:
        watch.begin()
        metrics = step(batch)
        float(metrics.loss)
        watch.done()
    watch.report()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
