"""The plain PyTorch loop: Phalanx's one device equals it, and it shares no code with what it judges."""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from models import MODELS, job, rows
from table import PLAIN_BAR, SHORT_STEPS, STEPS
from torch import nn

import phalanx as px
from chaos.run_equality import read_ledger
from law_rows import longer
from phalanx.data import GlobalBatchSampler
from phalanx.witness.plain_loop import Witness, why_not
from phalanx.witness.samples import GlobalBatches, KeyedOrder

SOURCE = Path(px.__file__).parent
HERE = SOURCE / "witness"
# What is written of a job and a plan, and what devices there are.
SPOKEN = (*(SOURCE / "config").glob("*"), *(SOURCE / "device_kinds").rglob("*"))
# What a job's own functions call: the user's side, with tests of its own.
USERS = {"train/loss.py", "data/table.py", "train/optimizers.py", "__init__.py"}  # the last looks up px.NAME


def apart(reference: list[float], other: list[float]) -> float:
    return max(abs(a - b) / abs(a) for a, b in zip(reference, other, strict=True))


def rates_of(witness: Witness) -> list[float]:
    return [next(iter(rates.values())) for rates in witness.rates]


def classify(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch["y"])


def trained(job: px.Job, plan: str) -> px.Run:
    spec = px.RunSpec(job="", plan=px.Plan.parse(plan), folder=Path("run"), forecast="none")
    return px.fit(job, run=spec)


def linear(**how: Any) -> px.Job:
    model = how.pop("model", lambda: nn.Linear(16, 5))
    return job(model, rows(), classify, **{"inputs": lambda batch: batch["x"], **how})


OFTEN = ("own GPT", "HF Mixtral")


@pytest.mark.parametrize("model", [*OFTEN, *longer(*(model for model in MODELS if model not in OFTEN))])
def test_one_device_equals_the_plain_loop(model: str) -> None:
    given = replace(MODELS[model](), steps=SHORT_STEPS)
    run = trained(given, "single")
    witness = Witness.of(given, SHORT_STEPS)
    assert len(run.losses) == SHORT_STEPS
    assert apart(witness.losses, run.losses) <= PLAIN_BAR
    steps = list(run.events("step"))
    assert apart(witness.norms, [event["grad_norm"] for event in steps]) <= 1e-4
    assert rates_of(witness) == [event["lr"] for event in steps]
    assert witness.counts == [event["count"] for event in steps]
    assert [sorted(ids) for ids in witness.samples] == [
        ids.tolist() for _, (_, ids) in sorted(read_ledger(run.folder / "ledger").items())
    ]


@pytest.mark.parametrize("precision", ["fp16", *longer("bf16")])
def test_half_precision_equals_the_plain_loop(precision: str) -> None:
    run = trained(MODELS["own GPT"](), f"precision={precision}")
    witness = Witness.of(MODELS["own GPT"](), STEPS, precision=precision)
    assert apart(witness.losses, run.losses) <= 1e-4
    # of all steps: that of one may be the same to the last bit on some processors
    assert apart(Witness.of(MODELS["own GPT"](), STEPS).losses, run.losses) > 1e-6, "computed in fp32"
    assert [event["skipped"] for event in run.events("step")] == witness.skipped


def test_an_fp16_overflow_is_skipped_and_the_schedule_goes_on() -> None:
    one = linear(steps=4, schedule=px.Schedule(warmup_steps=4), inputs=lambda batch: batch["x"] * 3e3, clip=None)
    run, witness = trained(one, "precision=fp16"), Witness.of(one, 4, precision="fp16")
    steps = list(run.events("step"))
    assert any(witness.skipped)
    assert [event["skipped"] for event in steps] == witness.skipped
    assert [event["lr"] for event in steps] == rates_of(witness)


SCHEDULES = (
    px.Schedule(decay="cosine", warmup_steps=3, floor=0.1),
    px.Schedule(decay="linear", warmup_samples=35, total_steps=9),
    px.Schedule(decay="step", milestones=(2, 5), gamma=0.5),
)


@pytest.mark.parametrize("schedule", [SCHEDULES[1], *longer(SCHEDULES[0], SCHEDULES[2])])
def test_rates_are_those_of_the_plain_loop(schedule: px.Schedule) -> None:
    one = linear(schedule=schedule, steps=12)
    witness = Witness.of(one, 12)
    given = [event["lr"] for event in trained(one, "single").events("step")]
    assert given == pytest.approx(rates_of(witness), rel=1e-12)
    assert len(set(given)) > 2


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_order_is_the_samplers(drop_last: bool) -> None:
    for length, epoch in product((1, 2, 3, 14, 40, 1023, 1024, 1025, 3000), (0, 3)):
        batch = min(14, length)
        given = list(GlobalBatches(length, batch, KeyedOrder(length, 7, epoch), drop_last))
        sampler = GlobalBatchSampler(length=length, batch=batch, seed=7, drop_last=drop_last)
        first = epoch * sampler.steps_per_epoch
        assert given == [ids.tolist() for _, _, ids in sampler.walk(first, first + sampler.steps_per_epoch)]
        flat = [sample for step in given for sample in step]
        assert len(set(flat)) == len(flat) == (length // batch * batch if drop_last else length)


def test_the_order_of_long_data_is_the_samplers() -> None:
    length = 2**24 + 5  # words of 64 bits
    order, sampler = KeyedOrder(length, 1, 2), GlobalBatchSampler(length=length, batch=8, seed=1)
    for index in (0, 77, sampler.steps_per_epoch - 1):
        ids = sampler.ids(2 * sampler.steps_per_epoch + index)
        assert [order[8 * index + offset] for offset in range(len(ids))] == ids.tolist()


class Drawing(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        import random

        noise = torch.randn(4) + float(np.random.rand()) + random.random()
        return {"x": torch.full((4,), float(index % 5)) + noise, "y": index % 3}


class DrawingMany(Drawing):
    def __getitems__(self, ids: list[int]) -> list[Any]:
        return [{"x": torch.randn(4), "y": index % 3} for index in ids]


class Flow(torch.utils.data.IterableDataset[Any]):
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for index in range(23):
            yield {"x": torch.randn(4) + self.epoch, "y": index % 3}


def masked(samples: list[Any]) -> Any:
    batch = torch.utils.data.default_collate(samples)
    return {**batch, "x": batch["x"] * (torch.rand_like(batch["x"]) > 0.3)}


class Noisy(nn.Module):
    """Dropout, a buffer changed in forward, and a part kept out of training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8))
        self.still = nn.Dropout(0.9).eval()
        self.head = nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.calls: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return self.head(self.still(self.inner(x)))


def noisy(data: Any, **how: Any) -> px.Job:
    given: dict[str, Any] = {
        "model": Noisy,
        "data": data,
        "loss": lambda output, batch: px.cross_entropy(output, batch["y"]),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "inputs": lambda batch: batch["x"],
        "batch": 7,
        "epochs": 2,
        "evaluate": Drawing,
        "metrics": lambda output, batch: {"accuracy": px.accuracy(output, batch["y"])},
        "evaluate_every": 3,
        **how,
    }
    return px.Job(**given)


NOISY = {
    "samples that draw": noisy(Drawing),
    "no last batch": noisy(Drawing, drop_last=True, clip=0.3),
    "data that read many": noisy(DrawingMany),
    "a part of them": noisy(lambda: torch.utils.data.Subset(DrawingMany(), range(3, 21))),
    "in order": noisy(lambda: [{"x": torch.arange(4.0) - index, "y": index % 3} for index in range(16)], shuffle=False),
    "masks drawn in collate": noisy(Drawing, collate=masked),
    "masks drawn of plain data": noisy(
        lambda: [{"x": torch.arange(4.0) - index, "y": index % 3} for index in range(18)], collate=masked
    ),
    "a stream": noisy(Flow),
    "a stream with masks": noisy(Flow, collate=masked, drop_last=True),
    "data drawn when made": noisy(lambda: torch.utils.data.StackDataset(x=torch.randn(20, 4), y=[0, 1] * 10)),
}


DRAWN = ("samples that draw", "masks drawn in collate", "a stream with masks")


@pytest.mark.parametrize("case", [*DRAWN, *longer(*(case for case in NOISY if case not in DRAWN))])
def test_everything_drawn_is_drawn_alike(case: str) -> None:
    run = trained(NOISY[case], "single")
    witness = Witness.of(NOISY[case], 100)
    assert apart(witness.losses, run.losses) <= PLAIN_BAR
    assert witness.epochs == [event["epoch"] for event in run.events("step")]
    evaluations = list(run.events("evaluate"))
    assert len(evaluations) == len(witness.evaluations) > 1
    for ours in evaluations:
        plain = witness.evaluations[ours["step"]]
        assert ours["samples"] == plain["samples"]
        assert ours["loss"] == pytest.approx(plain["loss"], rel=PLAIN_BAR)
        assert ours["metrics"] == pytest.approx(plain["metrics"], rel=PLAIN_BAR)
    assert float(witness.buffers["end"]["calls"]) == len(witness.losses)
    assert set(witness.state["end"]) == set(witness.values["end"])


def test_it_keeps_what_a_proof_looks_at() -> None:
    witness = Witness.of(linear(clip=0.01), 5)
    assert sorted(witness.reduced) == sorted(witness.used) == [0, 1, 2]
    assert witness.state["end"]["weight"]["exp_avg"].shape == (5, 16)
    assert witness.options["weight"]["weight_decay"] == 0.01
    assert "lr" not in witness.options["weight"]
    for name, start in witness.values["start"].items():
        assert not torch.equal(start, witness.values["first"][name])
        assert not torch.equal(witness.values["end"][name], witness.values["first"][name])
    for grads, norm in ((witness.reduced[0], witness.norms[0]), (witness.used[0], 0.01)):
        assert math.sqrt(sum(float(grad.square().sum()) for grad in grads.values())) == pytest.approx(norm, rel=1e-4)


def test_what_cannot_be_turned_says_why() -> None:
    assert why_not(linear()) == ""
    with pytest.raises(ValueError, match="closure"):
        Witness.of(linear(optimizer=lambda params: torch.optim.LBFGS(params)), 1)
    endless = noisy(Flow, schedule=px.Schedule(decay="cosine"))
    assert "nobody knows" in why_not(endless)


def imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            assert name not in ("import_module", "__import__", "run_path", "exec"), f"{path}: {name}"
    return found


def file_of(module: str) -> Path | None:
    path = SOURCE.joinpath(*module.split(".")[1:])
    if module.partition(".")[0] != "phalanx" or path == SOURCE:
        return None
    return next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.exists()), None)


def test_it_imports_nothing_that_it_judges() -> None:
    waiting, known = list(HERE.rglob("*.py")), set[Path]()
    assert waiting
    while waiting:
        path = waiting.pop()
        known.add(path)
        found = {one for module in imported(path) if (one := file_of(module)) is not None}
        # kinds of devices find their files by name; what they import themselves is below config, as contracts have it
        waiting += [one for one in found if one not in known and SOURCE / "device_kinds" not in one.parents]
    reached = {str(path.relative_to(SOURCE)) for path in known - set(HERE.rglob("*.py"))}
    allowed = ("config/", "files/", "errors.py", "units.py")
    assert [path for path in sorted(reached) if not path.startswith(allowed)] == []
    outside = {name.partition(".")[0] for path in HERE.rglob("*.py") for name in imported(path)}
    assert outside - sys.stdlib_module_names <= {"torch", "numpy", "safetensors", "phalanx"}


@pytest.mark.parametrize("make", [MODELS["own GPT"], lambda: NOISY["samples that draw"]])
def test_it_calls_nothing_that_it_judges(make: Any) -> None:
    one, called = make(), set[str]()
    witness_and_spec = {str(path.relative_to(SOURCE)) for path in (*HERE.rglob("*.py"), *SPOKEN)}

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            called.add(str(Path(frame.f_code.co_filename).relative_to(SOURCE)))

    sys.setprofile(look)
    try:
        Witness.of(one, 2, precision="bf16")
    finally:
        sys.setprofile(None)
    assert "witness/plain_loop.py" in called, "the look-out sees nothing"
    demo = {path for path in called if path.startswith("demo/jobs/")}  # models that a job here takes from there
    assert called - witness_and_spec - USERS - demo == set()
