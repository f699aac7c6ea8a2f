"""Law: n steps under P, a save, n more under Q are 2n steps on one device, for every P and Q.

Everything is computed in double precision, so that what order of addition may change is 1e-16 of a value and any
mistake (a step too many, a stale moment, a rate that moved, samples out of turn) is seen: the bound leaves four digits
for what some ten thousand additions and six steps make of it. One side is a loop of plain PyTorch, and values are
read from the checkpoint's files by ``safetensors`` alone.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from models import own_gpt
from safetensors import safe_open
from torch import Tensor

import phalanx as px
from phalanx.verify.witness.plain_loop import END, Witness

N = 3
BOUND = 1e-11
"""Of the largest value of each tensor: 2^-53 is 1e-16."""
FP32_BOUND = 1e-6
"""Where replicas that step by themselves are averaged, which is done in fp32: 2^-24 is 6e-8, 2N averagings."""

PLANS = (
    "single",
    "dp=2",
    "threads=2",
    "fsdp=2 zero=1",
    "fsdp=3 zero=2 micro=2",
    "fsdp=2",
    "dp=2 fsdp=2",
    "tp=2",
    "tp=2 sequence=true",
    "cp=2",
    "pp=2 micro=2",
    "pp=2 micro=2 schedule=interleaved",
    "pp=2 fsdp=2 tp=2 micro=2",
    "dp=2 shares=3,1",
    "dp=2 server=1",
    "dp=2 server=2",
)
"""Those that the law holds for with AdamW."""

APART = ("dp=2 sync=local", "dp=2 sync=diloco outer=sgd")
"""Replicas that step by themselves: one device's steps with plain SGD, of which the mean of values is that of steps."""

EXPERTS = ("single", "ep=2", "dp=2 ep=2", "fsdp=2", "ep=2 tp=2")
"""With a mixture of experts."""


def mixture() -> px.Job:
    """The example's mixture of experts, smaller."""
    path = Path(__file__).parents[2] / "examples" / "moe.py"
    spec = importlib.util.spec_from_file_location("example_moe", path)
    assert spec
    assert spec.loader
    moe = importlib.util.module_from_spec(spec)
    sys.modules["example_moe"] = moe
    spec.loader.exec_module(moe)
    size = replace(moe.SIZE, width=32, heads=2, context=12)
    data = lambda: moe.windows(size.context, "training")  # noqa: E731
    return replace(moe.job(), model=lambda: moe.MoE(size), data=data, batch=14, evaluate=None, metrics=None)


def double(job: px.Job, optimizer: Callable[[Any], torch.optim.Optimizer]) -> px.Job:
    """``job`` in double precision, for 2N steps."""

    return replace(job, model=lambda: job.model().double(), optimizer=optimizer, steps=2 * N)


def adam(params: Any) -> torch.optim.Optimizer:
    # An eps far above the rounding of gradients that are zero but for it.
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


JOBS: dict[str, px.Job] = {
    "GPT, AdamW": double(own_gpt(), adam),
    "GPT, SGD": replace(double(own_gpt(), sgd), clip=None),
    "mixture of experts, AdamW": double(mixture(), adam),
}

ROWS: dict[str, tuple[str, ...]] = {
    "GPT, AdamW": PLANS,
    "GPT, SGD": ("single", *APART, "dp=2", "fsdp=2", "dp=2 server=1"),
    "mixture of experts, AdamW": EXPERTS,
}


def bound(first: str, then: str) -> float:
    """What rounding may make of a run under these two plans, relative to the largest value of each tensor."""
    return FP32_BOUND if {first, then} & set(APART) else BOUND


def saved(job: px.Job, plan: str, folder: Path) -> Path:
    """The run folder of the first N steps of ``job`` under ``plan``."""
    run = px.RunSpec(job=job.name, plan=px.Plan.parse(plan), folder=folder, checkpoint_every=N, forecast="none")
    return px.fit(replace(job, steps=N), run=run).folder


def resumed(job: px.Job, plan: str, run_folder: Path, folder: Path) -> Path:
    """The last checkpoint after N more steps under ``plan`` of a copy, in ``folder``, of the run in ``run_folder``."""
    shutil.copytree(run_folder, folder)
    run = px.RunSpec(job=job.name, plan=px.Plan.parse(plan), folder=folder, resume=True, forecast="none")
    px.fit(job, run=run)
    return folder / "checkpoints" / f"step-{2 * N:08d}"


def values(checkpoint: Path) -> dict[str, Tensor]:
    """Name → the whole tensor of each parameter, put together from the files by what the manifest says."""
    found: dict[str, Tensor] = {}
    for name, entry in json.loads((checkpoint / "manifest.json").read_text())["tensors"].items():
        if not name.startswith("model."):
            continue
        whole = torch.full(entry["shape"], float("nan"), dtype=torch.float64)
        for chunk in entry["chunks"]:
            with safe_open(checkpoint / chunk["file"], framework="pt") as file:
                part = whole
                for dim, (offset, size) in enumerate(zip(chunk["offsets"], chunk["sizes"], strict=True)):
                    part = part.narrow(dim, offset, size)
                part.copy_(file.get_tensor(chunk["key"]))
        found[name.removeprefix("model.")] = whole
    return found


def difference(checkpoint: Path, one_device: dict[str, Tensor]) -> float:
    """The largest difference of any tensor, relative to its largest value; infinite where one is missing."""
    there = values(checkpoint)
    if not one_device.keys() <= there.keys():
        return float("inf")
    return max(
        float((there[name] - value.double()).abs().max() / value.abs().max().clamp_min(1e-300))
        for name, value in one_device.items()
    )


def on_one_device(job: px.Job) -> dict[str, Tensor]:
    """The parameters after 2N steps of a plain PyTorch loop."""
    return Witness.of(job, 2 * N).values[END]
