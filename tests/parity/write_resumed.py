"""Law: n steps under P, a save, n more under Q are 2n steps on one device, for every P and Q; and a page of all pairs.

Everything is computed in double precision, so that what order of addition may change is 1e-16 of a value and any
mistake (a step too many, a stale moment, a rate that moved, samples out of turn) is seen: the bound leaves four digits
for what some ten thousand additions and six steps make of it. One side is a loop of plain PyTorch, and values are
read from the checkpoint's files by ``safetensors`` alone.

``write_resumed.py [--render] PAGE``. Measures all pairs (``make resumed``), stores what was measured beside this file
and writes the page from what is stored; ``--render`` only writes. Exits with 1 where a pair is not within its bound.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from models import own_gpt
from safetensors import safe_open
from torch import Tensor

import phalanx as px
from phalanx.errors import PhalanxError
from phalanx.witness.plain_loop import END, Witness

N = 3
BOUND = 1e-11
"""Of the largest value of each tensor: 2^-53 is 1e-16."""
FP32_BOUND = 1e-6
"""Where replicas that step by themselves are averaged, which is done in fp32: 2^-24 is 6e-8, 2N averagings."""

PLANS = (
    *("single", "dp=2", "threads=2", "fsdp=2 zero=1", "fsdp=3 zero=2 micro=2", "fsdp=2", "dp=2 fsdp=2", "tp=2"),
    *("tp=2 sequence=true", "cp=2", "pp=2 micro=2", "pp=2 micro=2 schedule=interleaved", "pp=2 fsdp=2 tp=2 micro=2"),
    *("dp=2 shares=3,1", "dp=2 server=1", "dp=2 server=2"),
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


RESULTS = Path(__file__).with_name("resumed.json")

Store = dict[str, Any]  # "on": date, "torch": version, "tables": job → plan that saved → plan that went on → difference


def measure() -> Store:
    """The largest difference of every pair."""
    torch.set_num_threads(1)
    tables: dict[str, dict[str, dict[str, float | str]]] = {}
    for name, plans in ROWS.items():
        job, rows = JOBS[name], tables.setdefault(name, {})
        one_device = on_one_device(job)
        for first in plans:
            row = rows.setdefault(first, {})
            with tempfile.TemporaryDirectory() as folder:
                run = saved(job, first, Path(folder) / "first")
                for at, then in enumerate(plans):
                    try:
                        row[then] = difference(resumed(job, then, run, Path(folder) / str(at)), one_device)
                    except PhalanxError as error:  # a table that stops at the first failure hides the others
                        print(f"{name}, {first}, then {then}: {error}", file=sys.stderr)
                        row[then] = "failed"
    return {"on": datetime.date.today().isoformat(), "torch": torch.__version__, "tables": tables}


def wrong(store: Store) -> list[str]:
    """The pairs that are missing or beyond their bound."""
    return [
        f"{name}: {first}, then {then}"
        for name, plans in ROWS.items()
        for first in plans
        for then in plans
        if not _within(store["tables"].get(name, {}).get(first, {}).get(then), first, then)
    ]


def _within(found: float | str | None, first: str, then: str) -> bool:
    return isinstance(found, float | int) and found <= bound(first, then)


def page(store: Store) -> Iterator[str]:
    """The page, line by line."""
    pairs = sum(len(plans) ** 2 for plans in ROWS.values())
    equal = pairs - len(wrong(store))
    yield "# Resume under any plan"
    yield ""
    yield (
        f"{N} steps under the plan of a row, a checkpoint, {N} more under the plan of a column: the weights are those "
        f"of {2 * N} steps of a plain PyTorch loop on one device. **{equal} of {pairs} pairs are.**"
    )
    yield ""
    yield (
        "Shown is the largest difference of any tensor, relative to its largest value. Models compute in double "
        "precision, so that any mistake (a step too many, a stale moment, samples out of turn) would stand out: "
        f"the bound is {BOUND:.0e}, and {FP32_BOUND:.0e} where replicas that step by themselves are averaged, which is "
        f"done in fp32. Measured on {store['on']} with torch {store['torch']}, on CPUs; `make resumed` writes it."
    )
    for name, plans in ROWS.items():
        yield ""
        yield f"## {name}"
        yield ""
        yield f"| saved under | {' | '.join(f'`{plan}`' for plan in plans)} |"
        yield f"| --- {'| --- ' * len(plans)}|"
        for first in plans:
            row = store["tables"].get(name, {}).get(first, {})
            yield f"| `{first}` | {' | '.join(_cell(row.get(then), first, then) for then in plans)} |"


def _cell(found: float | str | None, first: str, then: str) -> str:
    if found is None:
        return "not measured"
    shown = f"{found:.0e}" if isinstance(found, float | int) else found
    return shown if _within(found, first, then) else f"**{shown}**"


def main() -> int:
    """Measure unless told to render only; write the page."""
    (target,), render = [one for one in sys.argv[1:] if one != "--render"], "--render" in sys.argv[1:]
    if not render:
        RESULTS.write_text(json.dumps(measure(), indent=1) + "\n")
    store = json.loads(RESULTS.read_text())
    Path(target).write_text("\n".join(page(store)) + "\n")
    for pair in wrong(store):
        print(f"not within its bound: {pair}", file=sys.stderr)
    return 1 if wrong(store) else 0


if __name__ == "__main__":
    sys.exit(main())
