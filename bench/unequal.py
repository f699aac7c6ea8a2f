"""Two workers of a core each, the second slowed four times: samples/s of ways to live with that, against the ideal.

``PYTHONPATH=tools python bench/unequal.py [--rounds N] [--slow 4] [--alone]``. Even synchronous replicas move at the
speed of the slow worker. What two workers could do together is the sum of their own speeds; over what the slowest
allows, that is (1 + 1/4) / (2 x 1/4) = 2.5. Rates are samples over seconds from a run's first steps, which are left
out, to its end; medians of the rounds, in each of which all plans run side by side. ``--alone`` measures each worker's
own speed, too.

The bar: at least 90 % of the ideal ratio.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from compare import announce
from emulator import Hosts, train_between
from phalanx.config import Plan, RunSpec
from phalanx.demo.jobs.gpt import gpt_job
from phalanx.events import RunLog

EVEN = "dp=2"
PLANS = ("dp=2 shares=auto", "server=1 dp=2 staleness=4", "server=1 dp=2 staleness=unbounded")
BAR = 0.90
BATCH = 40  # 32 and 8 samples, at four times the speed


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """What one run came to.

    Attributes:
        samples: a second.
        shares: samples of a batch that each worker took at last, where they are uneven.
    """

    samples: float
    shares: tuple[int, ...] = ()


def run(plan: str, steps: int, slow: float, *, alone: int | None = None) -> Rate:
    """Train ``steps`` steps under ``plan`` with the second worker slowed, or one worker ``alone`` (0 or 1)."""
    base = gpt_job(layers=2, width=160, heads=4, context=64, batch=BATCH, steps=steps)
    task, chosen = replace(base, evaluate=None, clip=None), Plan.parse(plan)
    with tempfile.TemporaryDirectory(prefix="phalanx-unequal-") as scratch, Hosts(2) as hosts:
        if alone != 0:
            hosts.throttle(0 if alone else 1, slow)
        spec = RunSpec(job="gpt", plan=chosen, folder=Path(scratch) / "run", forecast="none")
        train_between(hosts, task, spec)
        events = RunLog(spec.folder).events
    taken = [event for event in events if event["event"] == "step"]
    warm = len(taken) // 3  # shares have settled by then
    seconds = taken[-1]["time"] - taken[warm]["time"]
    shares = [event["shares"] for event in events if event["event"] == "shares"]
    samples = sum(event["samples"] for event in taken[warm + 1 :])
    return Rate(samples=samples / seconds, shares=tuple(shares[-1]) if shares else ())


def options() -> argparse.Namespace:
    """What is asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of all plans in turn")
    parser.add_argument("--slow", type=float, default=4.0, help="how many times the second worker is slowed")
    parser.add_argument("--steps", type=int, default=75, help="of each run; of the even one half as many")
    parser.add_argument("--alone", action="store_true", help="measure each worker's own speed, too")
    return parser.parse_args()


def main() -> int:
    """Run the rounds and print the table."""
    asked = options()
    announce()
    ideal = (1 + 1 / asked.slow) / (2 / asked.slow)
    even: list[Rate] = []
    others: dict[str, list[Rate]] = {plan: [] for plan in PLANS}
    own: list[tuple[float, float]] = []
    for number in range(asked.rounds):
        print(f"round {number + 1} of {asked.rounds}", file=sys.stderr)
        even.append(run(EVEN, asked.steps // 2, asked.slow))
        for plan, rates in others.items():
            rates.append(run(plan, asked.steps, asked.slow))
        if asked.alone:
            fast, slow = (run("single", asked.steps // 3, asked.slow, alone=worker).samples for worker in range(2))
            own.append((fast, slow))
    met = show(even, others, ideal, asked.slow)
    if own:
        fast, slow = (statistics.median(each) for each in zip(*own, strict=True))
        print(
            f"alone: {fast:.0f} and {slow:.0f} samples/s, {fast / slow:.2f} to 1, {fast + slow:.0f} in all; by these "
            f"speeds the ideal would be {(fast + slow) / (2 * slow):.2f} x even"
        )
    return 0 if met else 1


def show(even: list[Rate], others: dict[str, list[Rate]], ideal: float, slow: float) -> bool:
    """Print the table; whether every bar was met."""
    title = f"two workers, the second slowed {slow:g} times; ideal {ideal:.2f} x even"
    table = Table(title=title, title_justify="left")
    for heading in ("plan", "samples/s", "x even (median of rounds)", "of ideal", "bar", "last shares"):
        table.add_column(heading)
    table.add_row(EVEN, f"{statistics.median(one.samples for one in even):.0f}", "1.00", f"{1 / ideal:.0%}", "", "")
    met = True
    for plan, rates in others.items():
        ratios = [one.samples / base.samples for one, base in zip(rates, even, strict=True)]
        share = statistics.median(ratios) / ideal
        met = met and share >= BAR
        table.add_row(
            plan,
            f"{statistics.median(one.samples for one in rates):.0f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            f"{share:.0%}",
            f"{BAR:.0%} {'met' if share >= BAR else 'missed'}",
            ", ".join(map(str, rates[-1].shares)),
        )
    Console(width=130).print(table)
    return met


if __name__ == "__main__":
    sys.exit(main())
