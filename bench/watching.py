"""Cost of watching a run: replicas compared, numbers that are not finite looked for, against the same steps without.

A GPT of 10.9 million parameters on two ranks of one machine. Stretches of steps with everything on and with everything
off take turns in the same two processes, so that both see the same machine; the medians of their steps are compared.
As other programs move medians by more than a per cent, watching is timed by itself, too: per step the seconds of
comparing replicas, and of looking at gradients and parameters, which is on in every step. The bar is on that. The
thread of ``launch/hangs.py`` does nothing in a run that goes on.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import phalanx as px
from compare import rounds_from_command_line
from phalanx.comm import Place, default_process_group
from phalanx.config import Plan
from phalanx.config.run import DRIFT_EVERY
from phalanx.demo.jobs.gpt import gpt_job
from phalanx.launch.local import launch
from phalanx.train import step
from phalanx.train.assembly import build
from phalanx.train.drift import PARTS, DriftWatch

BAR = 0.01
PLAN = Plan(dp=2)


def job() -> px.Job:
    """The GPT, with a batch that two cores take about a second for."""
    return replace(gpt_job(layers=6, width=384, heads=6, context=64, batch=16, steps=10_000), clip=None)


def timed(norm: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """``norm``, and how long it takes each time."""

    def measured(*args: Any, **how: Any) -> Any:
        began = time.perf_counter()
        value = norm(*args, **how)
        seconds.append(time.perf_counter() - began)
        return value

    return measured


def work(rounds: int, stretch: int) -> Callable[..., Any]:
    """A worker's work: seconds of steps without and with watching, and what watching took by itself."""

    def measured(place: Place, report: Any) -> dict[str, list[float]]:
        torch.set_num_threads(1)
        found: dict[str, list[float]] = {"off": [], "on": [], "compare": [], "finite": []}
        step.global_norm = timed(step.global_norm, found["finite"])  # no clip: it looks, and nothing else
        cpu = torch.device("cpu")
        with default_process_group(place, cpu):
            assembly = build(job(), PLAN, place, cpu)
            batches = iter(assembly.loader)
            drift = DriftWatch.of(PLAN, place.rank, assembly.layout.parameters, "stop", DRIFT_EVERY)
            assert drift is not None
            for _ in range(3):
                assembly.step(next(batches))
            for turn in range(2 * rounds):
                watched = turn % 2 == 1
                assembly.step.drift = drift if watched else None
                for _ in range(stretch):
                    began = time.perf_counter()
                    assembly.step(next(batches))
                    found["on" if watched else "off"].append(time.perf_counter() - began)
            for at in range(PARTS):
                began = time.perf_counter()
                drift.stepped((at + 1) * DRIFT_EVERY - 1)
                found["compare"].append((time.perf_counter() - began) / DRIFT_EVERY)
        return found

    return measured


def main() -> int:
    rounds = rounds_from_command_line(5)
    rank_0 = launch(work(rounds, DRIFT_EVERY), PLAN.world_size)[0]
    off, on = statistics.median(rank_0["off"]), statistics.median(rank_0["on"])
    compare = statistics.median(rank_0["compare"])
    finite = statistics.fmean(rank_0["finite"])
    share = (compare + finite) / off
    print(f"a step of {sum(p.numel() for p in job().model().parameters()) / 1e6:.1f} M parameters on 2 ranks, medians")
    print(f"without watching {off * 1e3:8.1f} ms")
    print(f"with watching    {on * 1e3:8.1f} ms  {on / off - 1:+.2%}")
    print(f"replicas compared {compare * 1e3:.2f} ms, {compare / off:.2%}")
    print(f"looked for what is not finite {finite * 1e3:.2f} ms, {finite / off:.2%}")
    print(f"together {share:.2%} (bar: {BAR:.0%})  {'met' if share <= BAR else 'MISSED'}")
    return int(share > BAR)


if __name__ == "__main__":
    sys.exit(main())
