"""Forecast beside measured step time on this machine: every kind of plan, three models, 1, 2 and 4 processes.

``python bench/forecast_here.py [--on machine.toml] [--rounds N] [--only WORD] [--write]``; without ``--on`` it
calibrates first. The measured time of a plan is that of its fastest round: other work on the machine only ever adds.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import date
from multiprocessing import get_context
from pathlib import Path

import torch

import phalanx as px
from forecast_models import JOBS
from phalanx.comm import Place, device_for, joined
from phalanx.errors import PhalanxError
from phalanx.forecast import Forecast, Work, forecast
from phalanx.hardware import cluster, cores
from phalanx.hardware.quiet import wait_until_quiet
from phalanx.launch import launch
from phalanx.spec import Cluster, Plan
from phalanx.train.assembly import build
from phalanx.train.work import work_of

STEPS, WARM_UP = 10, 3
PATIENCE = 3.0  # seconds to wait before each run until nothing else computes
PAGE = Path(__file__).parent.parent / "docs/reference/accuracy-here.md"
PLANS = (
    *("dp=1", "dp=1 micro={half}", "dp=1 recompute=full", "dp=1 precision=bf16"),
    *("dp={n}", "dp={n} micro={part}", "dp={n} recompute=full", "dp={n} precision=bf16"),
    *("fsdp={n} zero=1", "fsdp={n} zero=2", "fsdp={n} zero=3", "fsdp={n} zero=3 recompute=full"),
    *("tp={n}", "pp={n} schedule=1f1b micro={fourth}", "pp={n} schedule=gpipe micro={fourth}", "cp={n}"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A plan of a job, foretold and measured.

    Attributes:
        job: its name.
        plan: it.
        foretold: what the forecast says.
        clock: seconds of a step in each round.
        core: seconds of each core that a step uses, in each round.
        busy: whether ``core`` stands for the time of a step.
    """

    job: str
    plan: Plan
    foretold: Forecast
    clock: tuple[float, ...]
    core: tuple[float, ...]
    busy: bool

    @property
    def error(self) -> float:
        """How far the forecast is above what was measured, as a share of it."""
        return self.expected / self.measured - 1

    @property
    def expected(self) -> float:
        """Seconds that the forecast says for what ``measured`` is: of a core, waiting for other stages is no part."""
        return self.foretold.step - (self.foretold.seconds["pipeline"] if self.busy else 0.0)

    @property
    def measured(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.core) if self.busy else min(self.clock)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--on", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--busy", action="store_true", help="other work runs: seconds of a core, not of the clock")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        there = cluster(given.on or _calibrated(Path(folder) / "machine.toml"))
    found = cases(there, given.rounds, given.only, busy=given.busy)
    print(table(found))
    if given.write:
        PAGE.write_text(page(found), encoding="utf-8")
    return 0


def cases(there: Cluster, rounds: int, only: str, *, busy: bool) -> list[Case]:
    """Every plan of every job, its rounds apart from each other in time."""
    asked: list[tuple[px.Job, Plan, Forecast]] = []
    for name, make in JOBS.items():
        job = make()
        work = _apart(make)
        for plan in plans(job.batch):
            if only in f"{name} {plan} n{plan.devices}":
                asked.append((job, plan, forecast(work, plan, there)))
    times: dict[int, list[tuple[float, float]]] = {}
    for turn in range(rounds):
        for index, (job, plan, foretold) in enumerate(asked):
            if turn and index not in times:
                continue
            try:
                times.setdefault(index, []).append(measured(job, plan))
            except PhalanxError as error:
                times.pop(index, None)
                print(f"{job.name} {plan}: {str(error).splitlines()[0][:110]}", file=sys.stderr)
                continue
            print(f"{job.name:8} {plan!s:44} {foretold.step:.4f} {times[index][-1]}", file=sys.stderr, flush=True)
    return [
        Case(
            job=job.name,
            plan=plan,
            foretold=foretold,
            clock=tuple(one for one, _ in times[index]),
            core=tuple(one for _, one in times[index]),
            busy=busy,
        )
        for index, (job, plan, foretold) in enumerate(asked)
        if index in times
    ]


def _apart(make: Callable[[], px.Job]) -> Work:
    """The work of a job, looked at in a process of its own: its memory would change how that of workers is kept."""
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        return pool.submit(_work, make).result()


def _work(make: Callable[[], px.Job]) -> Work:
    return work_of(make())


def plans(batch: int) -> list[Plan]:
    """Plans of 1, 2 and 4 processes."""
    texts = [
        text.format(n=n, half=batch // 2, part=batch // n // 2, fourth=batch // 4) for n in (1, 2, 4) for text in PLANS
    ]
    return [Plan.parse(one) for one in dict.fromkeys(texts) if "=1 zero" not in one and "p=1 s" not in one
            and not one.startswith(("tp=1", "cp=1", "pp=1"))]  # fmt: skip


def measured(job: px.Job, plan: Plan) -> tuple[float, float]:
    """Seconds of a step by the clock, of the faster ones, and of a core: what all processes use, over the cores."""
    wait_until_quiet(PATIENCE)
    asked = replace(job, steps=STEPS, epochs=None)

    def work(place: Place, report: Callable[[int], None]) -> list[tuple[float, float]]:
        torch.set_num_threads(1)
        with joined(place, device_for(place, "cpu")):
            assembly, times = build(asked, plan, place), list[tuple[float, float]]()
            batches = iter(assembly.loader)
            for _ in range(STEPS):
                begun, used = time.perf_counter(), time.process_time()
                assembly.step(next(batches))
                times.append((time.perf_counter() - begun, time.process_time() - used))
        return times[WARM_UP:]

    ranks = launch(work, plan.world_size)
    clock = sorted(one for one, _ in ranks[0])[(STEPS - WARM_UP) // 5]
    used = sum(statistics.median(one for _, one in rank) for rank in ranks)
    return clock, used / min(cores(), plan.world_size)


def _calibrated(path: Path) -> str:
    from phalanx.cli.calibrate import command

    command.main(["-o", str(path)], standalone_mode=False)
    return str(path)


def table(found: Sequence[Case]) -> str:
    """One row a plan, and the medians of the errors."""
    lines = [
        "| job | plan | forecast, ms | measured, ms | error | largest parts |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for one in found:
        parts = sorted(one.foretold.seconds.items(), key=lambda item: -item[1])[:3]
        text = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in parts)
        times = f"{1e3 * one.expected:.1f} | {1e3 * one.measured:.1f}"
        lines.append(f"| {one.job} | `{one.plan}` | {times} | {100 * one.error:+.0f} % | {text} |")
    return "\n".join([*lines, "", *medians(found)])


def medians(found: Sequence[Case]) -> list[str]:
    """Medians of the absolute errors: of all, by job, by processes and by kind of plan."""
    groups: dict[str, list[Case]] = {"all": list(found)}
    for one in found:
        for key in (one.job, f"{one.plan.devices} process{'es' if one.plan.devices > 1 else ''}", _kind(one.plan)):
            groups.setdefault(key, []).append(one)
    lines = ["| of | plans | median error | bias |", "| --- | ---: | ---: | ---: |"]
    for name, mine in groups.items():
        errors = [one.error for one in mine]
        middle = statistics.median(abs(one) for one in errors)
        bias = f"{100 * statistics.median(errors):+.0f} %"
        lines.append(f"| {name} | {len(mine)} | {100 * middle:.0f} % | {bias} |")
    return lines


def _kind(plan: Plan) -> str:
    if plan.fsdp > 1:
        return f"zero={plan.zero}"
    return next((f"{key}" for key in ("tp", "pp", "cp") if getattr(plan, key) > 1), "dp" if plan.dp > 1 else "single")


def page(found: Sequence[Case]) -> str:
    """The page of the documentation."""
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), platform.machine())  # fmt: skip
    told = (
        "Other work ran meanwhile, so the clock says little: measured are the seconds of each core that a step "
        "uses, its processes together, the median of its steps. They hold no waiting: what pipelines wait is left out "
        "of the forecast beside them, what exchanges wait is not"
        if found[0].busy
        else "Measured is a step by the clock, of all rounds the fastest"
    )
    head = [
        "# Forecasts of this machine's own runs",
        "",
        "Generated by `python bench/forecast_here.py --write` after `phalanx calibrate`; do not edit.",
        "",
        f"{date.today():%B %Y}, {cpu}, {cores()} cores, one thread a process; {STEPS - WARM_UP} steps of each plan, "
        f"rounds: {len(found[0].clock)}. {told}. With 4 processes two share a core.",
        "",
        "Constants of cores and exchanges come from the calibration. What sharded plans copy, the casts around "
        "products in 16 bits and how micro-batches add up were chosen with some of these runs in view.",
        "",
    ]
    return "\n".join([*head, *medians(found), "", "## Every plan", "", table(found).split("\n\n")[0], ""])


if __name__ == "__main__":
    sys.exit(main())
