"""The common harness: contenders run in turn (A B C, A B C, ...), and what counts is the median of each round's ratio.

Alternating and pairing take out what the machine does meanwhile: a slow minute slows both sides of its ratio.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from stopwatch import WARM_UP

BENCH = Path(__file__).resolve().parent
PYTHON = sys.executable
PHALANX = str(Path(PYTHON).parent / "phalanx")

Measures = dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One side of a comparison.

    Attributes:
        name: as printed.
        run: measures once; name of the measure → value, seconds or bytes.
        bar: our first contender may take at most this many times what this one takes; ``None``: shown, not judged.
    """

    name: str
    run: Callable[[], Measures]
    bar: float | None = None


class BenchError(Exception):
    """A contender failed; the text is its own output."""


def environment() -> dict[str, str]:
    """What every contender's process gets: one thread, this folder to import workloads from, and the code beside it."""
    paths = f"{BENCH}{os.pathsep}{BENCH.parent / 'src'}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore"}


def execute(argv: Sequence[str]) -> tuple[float, float, str]:
    """Run a command: Unix time of its start, wall seconds it took, its standard output.

    Raises:
        BenchError: if it fails; with its output.
    """
    began, clock = time.time(), time.perf_counter()
    done = subprocess.run(argv, env=environment(), cwd=BENCH, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - clock
    if done.returncode:
        raise BenchError(f"$ {' '.join(argv)}\n{done.stdout}\n{done.stderr}")
    return began, seconds, done.stdout


def script(path: str, *arguments: object, torchrun: int = 0) -> Callable[[], Measures]:
    """A contender's script that ends with the stopwatch's JSON line; under torchrun with so many processes, if any."""
    head = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", str(torchrun)] if torchrun else [PYTHON]
    argv = [*head, str(BENCH / path), *(str(argument) for argument in arguments)]

    def run() -> Measures:
        began, seconds, output = execute(argv)
        report = json.loads(next(line for line in reversed(output.splitlines()) if line.startswith("{")))
        named = {name: value for name, value in report.items() if name.endswith("_s") or name == "loss"}
        measures = {name: value for name, value in named.items() if value is not None}
        return {**measures, "first_step": report["first_step"] - began, "wall": seconds}

    return run


def train(job: str, plan: str, steps: int) -> Callable[[], Measures]:
    """``phalanx train`` of one of bench/jobs.py, measured by what its event log says."""

    def run() -> Measures:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "run"
            argv = [PHALANX, "train", f"{BENCH / 'jobs.py'}:{job}", "--plan", plan, "--steps", str(steps)]
            began, seconds, _ = execute([*argv, "--run", str(folder)])
            events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        stepped = [event for event in events if event["event"] == "step"]
        loops = [event["seconds"] for event in stepped[WARM_UP + 1 :]]
        measures = {"first_step": stepped[0]["time"] - began, "wall": seconds, "loss": stepped[-1]["loss"]}
        if loops:
            measures |= {"loop_s": statistics.median(loops), "mean_s": statistics.fmean(loops)}
        peaks = [event["peak_bytes"] for event in events if event["event"] == "memory"]
        if peaks:
            measures["peak_bytes"] = max(peaks)
        return measures

    return run


def command(*argv: str) -> Callable[[], Measures]:
    """A command of which only the wall time counts."""

    def run() -> Measures:
        return {"wall": execute(argv)[1]}

    return run


def alternate(contenders: Sequence[Contender], rounds: int, *, warm_up: int = 1) -> list[list[Measures]]:
    """Measures of every round, contenders in the order given, after ``warm_up`` unmeasured rounds that fill caches."""
    results: list[list[Measures]] = []
    for number in range(1 - warm_up, rounds + 1):
        measured = [contender.run() for contender in contenders]
        if number > 0:
            results.append(measured)
        if sys.stderr.isatty():
            print(f"round {number} of {rounds}", end="\r", file=sys.stderr, flush=True)
    return results


def ratio(results: list[list[Measures]], measure: str, ours: int, peer: int) -> float:
    """Median over the rounds of ours / peer."""
    return statistics.median(row[ours][measure] / row[peer][measure] for row in results)


def show(title: str, contenders: Sequence[Contender], results: list[list[Measures]], measure: str) -> bool:
    """Print one measure of all contenders against the first, and say whether every bar is met."""
    table = Table(title=f"{title} ({measure}, medians of {len(results)} rounds)", title_justify="left")
    for heading in ("contender", "median", "spread", "ours / it", "bar", ""):
        table.add_column(heading, justify="left" if heading == "contender" else "right")
    met = True
    for index, contender in enumerate(contenders):
        values = [row[index][measure] for row in results if measure in row[index]]
        if not values:
            continue
        times = ratio(results, measure, 0, index)
        good = contender.bar is None or times <= contender.bar
        met = met and good
        table.add_row(
            contender.name,
            _seconds(statistics.median(values)),
            f"{_seconds(min(values))} to {_seconds(max(values))}",
            f"{times:.3f}" if index else "",
            f"<= {contender.bar}" if contender.bar else "",
            "" if contender.bar is None else ("met" if good else "MISSED"),
        )
    Console(width=120).print(table)
    return met


def announce() -> None:
    """Print when, on what and by which command what follows was measured, as an entry of the log has it."""
    import torch

    what = f"{os.cpu_count()} cores, torch {torch.__version__}"
    command = " ".join(["python", f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    print(f"**When** {datetime.date.today()} · **machine** {what} · **command** `{command}`", flush=True)


def rounds_from_command_line(default: int) -> int:
    """``--rounds N`` of a measuring script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=default, help="measured rounds; more give steadier medians")
    rounds = parser.parse_args().rounds
    announce()
    print(f"{rounds} measured rounds", flush=True)
    return rounds


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} µs"
