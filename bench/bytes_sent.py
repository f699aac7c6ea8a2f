"""Bytes sent in one optimizer step under every kind of plan, counted, against what the papers say it takes.

Usage: bytes_sent.py [PLAN ...]; with plans, each kind of message is listed beside what is due.

Deterministic: no clock is read. The step counted is the second, when everything that is told once has been told.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import phalanx as px
from compare import announce
from counting import Sent
from phalanx.comm import Place, default_process_group
from phalanx.config import Plan
from phalanx.demo.jobs import gpt
from phalanx.launch.jobfile import load_job
from phalanx.launch.local import launch
from phalanx.train.assembly import build
from textbook import Model, terms

BAR = 1.05
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 4, 128, 4, 64, 16

DENSE = (
    "dp=2",
    "dp=4",
    "fsdp=4 zero=1",
    "fsdp=4 zero=2",
    "fsdp=4 zero=3",
    "fsdp=4 zero=3 micro=2",
    "dp=2 fsdp=2 zero=2",
    "dp=2 fsdp=2 zero=3",
    "tp=2",
    "tp=4",
    "tp=2 sequence=true",
    "tp=4 sequence=true",
    "pp=2 micro=2",
    "pp=4 micro=2",
    "pp=4 micro=2 schedule=gpipe",
    "pp=2 micro=2 schedule=interleaved",
    "pp=2 micro=2 schedule=zero-bubble",
    "pp=2 micro=2 schedule=zbv",
    "pp=2 micro=2 schedule=dualpipev",
    "cp=2",
    "cp=4",
    "cp=4 attention=alltoall",
    "cp=4 attention=gather",
    "dp=2 tp=2",
    "dp=2 pp=2 micro=2",
    "pp=2 tp=2 micro=2",
    "pp=2 tp=2 micro=2 sequence=true",
    "cp=2 tp=2",
    "cp=2 pp=2 micro=2",
    "dp=2 cp=2",
    "fsdp=2 tp=2",
    "fsdp=2 cp=2",
    "fsdp=2 pp=2 zero=1 micro=2",
    "fsdp=2 pp=2 micro=2",
    "pp=2 fsdp=2 tp=2 micro=2",
    "pp=2 dp=2 tp=2 micro=2",
)
EXPERTS = ("ep=2", "ep=4", "dp=2 ep=2", "fsdp=2 ep=2")


def dense(
    layers: int = LAYERS, width: int = WIDTH, context: int = CONTEXT, batch: int = BATCH, steps: int = 2
) -> tuple[px.Job, Model]:
    """A GPT and what a formula needs to know of it."""
    job = gpt.gpt_job(layers=layers, width=width, heads=HEADS, context=context, batch=batch, steps=steps)
    sizes = {name: tensor.numel() * 4 for name, tensor in job.model().named_parameters()}
    cut = ("token.weight", "query_key_value.weight", "attention.output.weight", "up.weight", "up.bias", "down.weight")
    shared_out = sum(size for name, size in sizes.items() if name.endswith((*cut, "head.weight")))
    tokens = batch * context
    return replace(job, evaluate=None, metrics=None), Model(
        layers=layers,
        activation=tokens * width * 4,
        per_token=tokens * 4,
        shared_out=shared_out,
        whole=sum(sizes.values()) - shared_out,
    )


def experts() -> tuple[px.Job, Model]:
    """The mixture of experts of the examples."""
    job = load_job(str(EXAMPLES / "moe.py"))
    sizes = {name: tensor.numel() * 4 for name, tensor in job.model().named_parameters()}
    inside = sum(size for name, size in sizes.items() if ".experts." in name)
    width, layers = sizes["norm.weight"] // 4, sum(name.endswith("router.weight") for name in sizes)
    tokens = job.batch * sizes["position.weight"] // 4 // width
    return replace(job, evaluate=None, metrics=None), Model(
        layers=layers,
        activation=tokens * width * 4,
        per_token=tokens * 4,
        shared_out=0,
        whole=sum(sizes.values()) - inside,
        experts=inside,
        chosen=2,
    )


def sent(job: px.Job, plan: Plan) -> Callable[..., list[list[Any]]]:
    """A worker's work: what this rank sends in the second step, as [kind, ranks, calls, bytes]."""

    def work(place: Place, report: Any) -> list[list[Any]]:
        torch.set_num_threads(1)
        with default_process_group(place, torch.device("cpu")):
            assembly = build(job, plan, place, torch.device("cpu"))
            batches = iter(assembly.loader)
            assembly.step(next(batches))
            batch = next(batches)
            with Sent() as counted:
                assembly.step(batch)
            return [[*key, counted.calls_of[key], size] for key, size in counted.bytes_of.items()]

    return work


def measured(job: px.Job, plan: Plan) -> Counter[str]:
    """Kind of operation and its ranks → bytes over all ranks of the plan."""
    found: Counter[str] = Counter()
    for rows in launch(sent(job, plan), plan.world_size):
        for kind, ranks, _, size in rows:
            found[f"{kind} over {ranks}"] += size
    return found


def main() -> int:
    met = True
    announce()
    print(f"bytes sent in a step, all ranks together, against the papers (bar <= {BAR})")
    for (job, model), plans in ((dense(), DENSE), (experts(), EXPERTS)):
        asked = [text for text in sys.argv[1:] if (" ep=" in f" {text}") == (plans is EXPERTS)]
        for text in asked if len(sys.argv) > 1 else plans:
            plan = Plan.parse(text)
            found, formula = measured(job, plan), terms(plan, model, job.batch)
            total, whole = sum(found.values()), sum(term.size for term in formula)
            good = total <= BAR * whole
            met = met and good
            verdict = "met" if good else "MISSED"
            print(f"{text:36} {total:12,.0f} {whole:12,.0f}  {total / whole:.3f}  {verdict}", flush=True)
            if len(sys.argv) > 1 or not good:
                for kind, size in found.most_common():
                    print(f"    sent {size:12,.0f}  {kind}")
                for term in formula:
                    print(f"    due  {term.size:12,.0f}  {term.what} ({term.source})")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
