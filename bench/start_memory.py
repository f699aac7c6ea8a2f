"""What a rank's memory really holds from its first line to the end of its second step, beside what was forecast.

Measured: resident memory (``VmHWM``), which the kernel keeps the highest mark of, so that nothing between two looks is
missed; forgotten at the worker's first line. A forked worker begins with pages of its parent; what was resident at the
first line is taken off, and so is what the same plan adds with a model of next to nothing, which is the base: what is
imported, process groups, threads. ``private`` is the most that was the worker's alone (``Private_*`` of
``smaps_rollup``) in looks 50 ms apart, base taken off: pages that are shared with the parent or other ranks are not in
it, a copy of one that was written to is.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import phalanx as px
from phalanx.comm import Place
from phalanx.launch.local import launch
from phalanx.preflight import forecast_here
from phalanx.train.interruptions import LauncherLink
from phalanx.train.loop import train

MIB = 2**20
BAR = 1.1
RANKS, WIDTH, BLOCKS = 4, 2048, 48  # 768 MiB in fp32
STEPS = 2
PLANS = ("fsdp=4 zero=1", "fsdp=4 zero=2", "fsdp=4 zero=3", "dp=2 fsdp=2 zero=3")
_LOOKS = 0.05  # seconds; each takes the kernel longer the more there is


class Stack(nn.Module):
    """Alike blocks, each a product and what follows it."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + 0.01 * block(x)
        return x


def job(width: int, blocks: int) -> px.Job:
    """Steps with AdamW."""
    rows = torch.randn(64, width, generator=torch.Generator().manual_seed(0))
    return px.Job(
        model=lambda: Stack(width, blocks),
        data=lambda: px.Table(x=rows),
        loss=lambda output, batch: px.mse(output, batch["x"] * 2),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
        batch=4,
        steps=STEPS + 1,
    )


class _EnoughError(Exception):
    """The steps that are looked at are over; the checkpoint at a run's end is not among them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peaks:
    """Bytes that one rank came to, over what it had at its first line.

    Attributes:
        start: resident, until the first step began.
        whole: resident, until the second step ended.
        private: the worker's alone.
    """

    start: int
    whole: int
    private: int


def peaks(job: px.Job, plan: str) -> list[Peaks]:
    """What each rank comes to while it trains ``job``."""
    with tempfile.TemporaryDirectory() as folder:
        run = px.RunSpec(job="stack", plan=px.Plan.parse(f"{plan} device=cpu"), folder=Path(folder) / "run")
        run.folder.mkdir()

        def work(place: Place, report: Callable[[int], None]) -> list[int]:
            forget_peak()
            first, marks = kilobytes("VmRSS"), []

            def begins(step: int) -> None:
                marks.append(kilobytes("VmHWM"))
                if step == STEPS:
                    raise _EnoughError

            with _Private() as private, suppress(_EnoughError):
                train(job, run, place, LauncherLink(report=begins))
            return [1024 * (marks[0] - first), 1024 * (marks[STEPS] - first), private.most]

        found = launch(work, run.plan.world_size)
    return [Peaks(start=start, whole=whole, private=private) for start, whole, private in found]


def kilobytes(what: str) -> int:
    """A line of the kernel's own account of this process."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(what))


def forget_peak() -> None:
    """Let the kernel's highest mark begin anew."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


class _Private:
    """Looks at this process's own pages while a block runs.

    Attributes:
        most: bytes, over those at its begin.
    """

    def __init__(self) -> None:
        self.most = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> _Private:
        self._first = self._now()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(_LOOKS):
            self.most = max(self.most, self._now() - self._first)

    @staticmethod
    def _now() -> int:
        with open("/proc/self/smaps_rollup") as file:
            return sum(1024 * int(line.split()[1]) for line in file if line.startswith("Private_"))


def main() -> int:
    """Print a row a plan; 1 where a rank needs more than the bar."""
    width, blocks = (int(word) for word in sys.argv[1:3]) if len(sys.argv) > 1 else (WIDTH, BLOCKS)
    big, small = job(width, blocks), job(16, 2)
    whole, block = 4 * blocks * (width + 1) * width, 4 * (width + 1) * width
    print(f"MiB on the rank that needs most: {whole / MIB:.0f} MiB of parameters in {blocks} blocks, AdamW", flush=True)
    print(f"{'plan':20} {'base':>8} {'start':>8} {'forecast':>8} {'peak':>8} {'private':>8} {'forecast':>8}  ratio")
    met = True
    for plan in sys.argv[3:] or PLANS:
        base, found = peaks(small, plan), peaks(big, plan)
        told = forecast_here(big, px.Plan.parse(f"{plan} device=cpu"))["forecast"]
        least = {name: min(getattr(one, name) for one in base) for name in ("start", "whole", "private")}
        most = {name: max(getattr(one, name) for one in found) - least[name] for name in least}
        ratio = most["whole"] / told["allocated"]
        columns = [
            least["whole"],
            most["start"],
            told.get("start", 0),
            most["whole"],
            most["private"],
            told["allocated"],
        ]
        print(f"{plan:20} {' '.join(f'{one / MIB:8.1f}' for one in columns)} {ratio:6.2f}", flush=True)
        sharded = px.Plan.parse(plan).zero == 3
        met &= ratio <= BAR and (not sharded or most["start"] <= whole / RANKS + block)
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
