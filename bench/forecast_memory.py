"""What a rank's memory really holds under each kind of plan, beside what was forecast, by part.

Measured: bytes of tensors that a run's first steps see on the rank that has most (see ``train/memory_use.py``): what
comes and goes within one operation is not among them. Forecast: the same parts, from the traced profile alone. Of a
sharded plan the parameters hold what was gathered.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import phalanx as px
from phalanx.demo.jobs.gpt import gpt_job
from phalanx.forecast import PHALANX, Work
from phalanx.forecast.layouts import Layouts
from phalanx.forecast.memory import memory
from phalanx.report.summary import summarise
from phalanx.train.traced_job import work_of

BAR = 0.05
PARTS = ("parameters", "gradients", "optimizer", "activations")
PLANS = (
    "single",
    "single micro=8",
    "single recompute=full",
    "single recompute=selective",
    "single precision=bf16",
    "dp=2",
    "dp=2 micro=4",
    "fsdp=2 zero=1",
    "fsdp=2 zero=1 micro=4",
    "fsdp=2 zero=2 micro=4",
    "fsdp=2 zero=3",
    "fsdp=2 zero=3 micro=4 recompute=full",
    "fsdp=2 zero=3 precision=bf16",
    "tp=2",
    "tp=2 sequence=true",
    "cp=2",
    "pp=2 micro=4 schedule=gpipe",
    "pp=2 micro=4",
    "pp=2 micro=4 schedule=interleaved",
    "pp=2 micro=4 schedule=zero-bubble",
    "pp=2 micro=4 schedule=zbv",
    "pp=2 micro=4 schedule=dualpipev",
    "pp=4 micro=4",
    "tp=4",
    "tp=2 pp=2 micro=4",
    "fsdp=2 tp=2",
    "fsdp=2 pp=2 zero=1 micro=4",
    "dp=2 pp=2 micro=2 recompute=full",
    "fsdp=2 cp=2 precision=bf16",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """Bytes by part, of one plan: forecast and measured."""

    forecast: dict[str, float]
    measured: dict[str, float]

    @property
    def off(self) -> float:
        """Of all parts together, forecast over measured, less 1."""
        return sum(self.forecast.values()) / sum(self.measured.values()) - 1


def beside(job: px.Job, text: str, work: Work | None = None) -> Beside:
    """Run two steps of ``job`` under a plan, and forecast them."""
    plan = px.Plan.parse(text)
    work = work or work_of(job)
    layouts = Layouts.of([plan], work.batch, work.tokens)
    found = memory(work.profile, layouts, PHALANX, plan.precision, work.state)
    forecast = {name: float(getattr(found, name)[0]) for name in PARTS}
    forecast["parameters"] += float(found.gathered[0])
    with tempfile.TemporaryDirectory() as folder:
        run = px.fit(replace(job, steps=2, epochs=None), plan, folder=Path(folder) / "run")
        ranks = summarise(run.folder).memory
    most = max(ranks, key=lambda parts: sum(parts.values()))
    return Beside(forecast=forecast, measured={name: float(most[name]) for name in PARTS})


def main() -> int:
    job = gpt_job(layers=4, width=128, heads=4, context=128, batch=32, steps=2)
    work = work_of(job)
    met = True
    print("MiB on the rank that holds most, forecast/measured: a GPT of 0.9 M parameters, AdamW")
    print(f"{'plan':38} {'parameters':>13} {'gradients':>13} {'optimizer':>13} {'activations':>15}  together")
    for text in sys.argv[1:] or PLANS:
        found = beside(job, text, work)
        columns = [f"{found.forecast[name] / 2**20:.2f}/{found.measured[name] / 2**20:.2f}" for name in PARTS]
        met &= abs(found.off) <= BAR
        print(f"{text:38} " + " ".join(f"{one:>13}" for one in columns) + f"  {found.off:+.1%}", flush=True)
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
