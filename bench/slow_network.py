"""Two hosts with a thin link, 100 Mbit/s and 20 ms: seconds to a fixed validation loss, and bytes sent.

``PYTHONPATH=tools python bench/slow_network.py [--steps N] [--rate 100] [--delay 20]``. A GPT of 10.9 million
parameters learns real text on two hosts of one core each. The target is 1 % above the loss that synchronous training
(DDP) has after N steps; every other plan trains half as many steps again. ``no limit`` is the same DDP between the
same hosts over a link that is not shaped: what removing the traffic altogether would allow. Time for evaluations is
taken out on all sides.

The bars: DiLoCo at least 5 times as fast as DDP and 80 % of what ``no limit`` allows, with at most 2 % of DDP's bytes;
PowerSGD or int8 at least 3 times as fast as DDP.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import phalanx as px
from compare import announce
from emulator import Hosts, train_between
from phalanx.config import Plan, RunSpec
from phalanx.demo.jobs.gpt import gpt_job, windows
from phalanx.events import RunLog

DDP, DILOCO = "dp=2", "dp=2 sync=diloco every=25 outer_momentum=0.5 compress=int8"
COMPRESSED = ("dp=2 compress=powersgd:16", "dp=2 compress=int8")
CONTEXT, WINDOWS, EVERY = 64, 40, 25  # bytes of context, windows in an evaluation, steps between evaluations
MARGIN = 0.01  # of the loss; from one evaluation to the next it goes up and down by as much
FASTER, OF_IDEAL, BYTES, COMPRESSED_FASTER = 5.0, 0.80, 0.02, 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One plan on one network.

    Attributes:
        name: as printed.
        steps: steps it took.
        step: median seconds of one.
        curve: (step, seconds of training so far, validation loss).
        sent: bytes that each host sent for a step, on the link.
    """

    name: str
    steps: int
    step: float
    curve: list[tuple[int, float, float]]
    sent: float

    def reached(self, target: float) -> tuple[int, float] | None:
        """Step and seconds of the first evaluation at or below ``target``."""
        return next(((step, seconds) for step, seconds, loss in self.curve if loss <= target), None)


def job(steps: int) -> px.Job:
    """The job, of so many steps, at a constant learning rate, so that step k is the same however many follow."""
    base = gpt_job(layers=6, width=384, heads=6, context=CONTEXT, batch=8, steps=steps)
    held_out = windows(CONTEXT, "evaluation")
    few = [held_out[index] for index in range(0, len(held_out), max(1, len(held_out) // WINDOWS))]
    return replace(base, schedule=px.Schedule(warmup_steps=20), evaluate=lambda: few, evaluate_every=EVERY)


def run(name: str, plan: str, task: px.Job, network: dict[str, Any]) -> Arm:
    """Train ``task`` under ``plan`` on two hosts with this network between them."""
    chosen = Plan.parse(plan)
    with tempfile.TemporaryDirectory(prefix="phalanx-network-") as scratch, Hosts(2, **network) as hosts:
        spec = RunSpec(job="gpt", plan=chosen, folder=Path(scratch) / "run", forecast="none")
        train_between(hosts, task, spec)
        sent = hosts.bytes_sent(0)
        events = RunLog(spec.folder).events
    return arm(name, events, sent)


def arm(name: str, events: list[dict[str, Any]], sent: float) -> Arm:
    """What a run's events say of it."""
    began = next(event["time"] for event in events if event["event"] == "start")
    evaluating, curve = 0.0, []
    for event in (event for event in events if event["event"] == "evaluate"):
        evaluating += event["seconds"]
        curve.append((event["step"], event["time"] - began - evaluating, event["loss"]))
    steps = [event["seconds"] for event in events if event["event"] == "step"]
    return Arm(name=name, steps=len(steps), step=statistics.median(steps[3:]), curve=curve, sent=sent / len(steps))


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=150)
    options.add_argument("--rate", type=float, default=100.0, help="Mbit/s")
    options.add_argument("--delay", type=float, default=20.0, help="ms")
    asked = options.parse_args()
    announce()
    network, console = {"rate": 1e6 * asked.rate, "delay": asked.delay / 1e3}, Console(width=130)
    ddp = run("DDP", DDP, job(asked.steps), network)
    free = run("DDP, no limit", DDP, job(asked.steps), {})
    target = ddp.curve[-1][2] * (1 + MARGIN)
    longer = asked.steps * 3 // 2
    others = [run("DiLoCo", DILOCO, job(longer), network)]
    others += [run(plan, plan, job(longer), network) for plan in COMPRESSED]
    title = f"to a validation loss of {target:.3f}, {asked.rate:g} Mbit/s, {asked.delay:g} ms"
    table = Table(title=title, title_justify="left")
    for heading in ("", "s/step", "steps", "seconds", "x DDP", "of no limit", "MB/step sent", "of DDP's bytes"):
        table.add_column(heading)
    found = {one.name: one.reached(target) for one in (ddp, free, *others)}
    base, ideal = found["DDP"], found["DDP, no limit"]
    assert base is not None
    assert ideal is not None
    for one in (ddp, free, *others):
        reached = found[one.name]
        if reached is None:
            table.add_row(one.name, f"{one.step:.2f}", "never", "", "", "", f"{one.sent / 1e6:.2f}", "")
            continue
        steps, seconds = reached
        total = one.sent * steps / (ddp.sent * base[0])
        table.add_row(
            one.name,
            f"{one.step:.2f}",
            str(steps),
            f"{seconds:.0f}",
            f"{base[1] / seconds:.1f}",
            f"{ideal[1] / seconds:.0%}",
            f"{one.sent / 1e6:.2f}",
            f"{total:.1%}",
        )
    console.print(table)
    for one in (ddp, free, *others):
        console.print(one.name, *(f"{step}: {loss:.3f}" for step, _, loss in one.curve), sep="  ", highlight=False)
    return 0 if met(found, ddp, others) else 1


def met(found: dict[str, tuple[int, float] | None], ddp: Arm, others: list[Arm]) -> bool:
    """Whether every bar is met."""
    base, ideal, diloco = found["DDP"], found["DDP, no limit"], found["DiLoCo"]
    if not (base and ideal and diloco):
        return False
    bytes_share = others[0].sent * diloco[0] / (ddp.sent * base[0])
    compressed = [base[1] / reached[1] for plan in COMPRESSED if (reached := found[plan])]
    return (
        base[1] / diloco[1] >= FASTER
        and ideal[1] / diloco[1] >= OF_IDEAL
        and bytes_share <= BYTES
        and max(compressed, default=0.0) >= COMPRESSED_FASTER
    )


if __name__ == "__main__":
    sys.exit(main())
