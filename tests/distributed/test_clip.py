"""Clipping by value, by norm and by group: under every plan as torch.nn.utils does it in a loop by hand, and proven."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small import BATCH, fit, job, table
from torch import nn
from torch.optim import SGD

import phalanx as px
from longer import longer
from phalanx.errors import PhalanxError, SpecError

STEPS = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(9, 16), nn.Linear(16, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Two blocks and a head, whose gradients are larger."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model() -> nn.Module:
    made = Model()
    if next(made.parameters()).device.type != "meta":
        made.load_state_dict(START)
    return made


torch.manual_seed(3)
START = {name: value.clone() for name, value in Model().state_dict().items()}

CLIPS = {
    "norm": px.Clip(norm=0.3),
    "value": px.Clip(value=0.02),
    "inf": px.Clip(norm=0.05, norm_type=math.inf),
    "group": px.Clip(norm=0.2, per="group"),
    "inf group": px.Clip(norm=0.04, norm_type=math.inf, per="group"),
}


def optimizer(params: Any) -> Any:
    return SGD(px.groups(params, {"head.*": {"lr": 0.2}, "*.0.*": {"momentum": 0.5}}), lr=0.5, momentum=0.9)


def sets(module: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters of each group, by hand."""
    named = dict(module.named_parameters())
    return [[one for name, one in named.items() if name.startswith(key)] for key in ("blocks.1", "head", "blocks.0")]


def clipped(module: nn.Module, how: px.Clip) -> int:
    """Clip with torch's own functions; gives how many of what is clipped by itself was above the limit."""
    if how.value is not None:
        many = sum(int((one.grad.abs() > how.value).sum()) for one in module.parameters() if one.grad is not None)
        nn.utils.clip_grad_value_(module.parameters(), how.value)
        return many
    assert how.norm is not None
    each = sets(module) if how.per == "group" else [list(module.parameters())]
    return sum(float(nn.utils.clip_grad_norm_(one, how.norm, norm_type=how.norm_type)) > how.norm for one in each)


def plain(how: px.Clip) -> tuple[dict[str, torch.Tensor], set[int]]:
    module, data = model(), table().__getitems__(list(range(len(table()))))
    second, head, first = sets(module)
    groups = [{"params": second}, {"params": head, "lr": 0.2}, {"params": first, "momentum": 0.5}]
    made, counts = SGD(groups, lr=0.5, momentum=0.9), set[int]()
    for start in [*range(0, len(data["x"]), BATCH), *range(0, len(data["x"]), BATCH)][:STEPS]:
        made.zero_grad()
        x, y = (data[key][start : start + BATCH] for key in ("x", "y"))
        nn.functional.cross_entropy(module(x), y).backward()
        counts.add(clipped(module, how))
        made.step()
    return module.state_dict(), counts


def run(plan: str, folder: Path, how: Any, **other: Any) -> px.Run:
    given = {"model": model, "shuffle": False, "epochs": None, "steps": STEPS, "inputs": lambda batch: batch["x"]}
    return fit(plan, folder, clip=how, **{"optimizer": optimizer, **given, **other})


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-4, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    ("plan", "how"),
    [
        ("single micro=5", "value"),
        ("fsdp=2 zero=1", "group"),
        ("tp=2", "inf group"),
        *longer(
            *((plan, how) for plan in ("dp=2", "threads=2", "fsdp=2 zero=2") for how in ("value", "inf group")),
            *((plan, "norm") for plan in ("fsdp=2 zero=3 offload=optimizer", "pp=2 micro=8", "dp=2 server=1")),
        ),
    ],
)
def test_every_plan_clips_as_torch_does(plan: str, how: str, tmp_path: Path) -> None:
    expected, counts = plain(CLIPS[how])
    assert counts != {0}, "nothing is clipped"
    same(run(plan, tmp_path / "run", CLIPS[how]).state_dict(), expected)


@pytest.mark.parametrize(
    ("plan", "how"),
    [("pp=2 micro=8", "inf"), *longer(("tp=2", "group"), ("single precision=fp16", "group"))],
)
def test_it_is_proven(plan: str, how: str) -> None:
    one = job(model=model, inputs=lambda batch: batch["x"], optimizer=optimizer, clip=CLIPS[how])
    proof = px.prove(one, plan, steps=4)
    assert proof.equal, proof


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 9, sparse=True), nn.Linear(9, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens).mean(1))


@pytest.mark.parametrize("how", ["value", "inf group", *longer("norm", "inf", "group")])
def test_sparse_gradients_are_clipped_as_dense_ones(how: str, tmp_path: Path) -> None:
    def sparse(plan: str, model: Any) -> dict[str, torch.Tensor]:
        given = {"model": model, "inputs": lambda batch: (batch["x"].abs() * 5).long().clamp(max=19)}
        made = lambda params: SGD(px.groups(params, {"head.*": {"lr": 0.2}}), lr=0.5)  # noqa: E731
        return run(plan, tmp_path / f"{plan} {model}", CLIPS[how], optimizer=made, **given).state_dict()

    def dense() -> nn.Module:
        one = Sparse()
        one.embedding.sparse = False
        return one

    same(sparse("dp=2", Sparse), sparse("single", dense))


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "clip"),
        ({"norm": 1.0, "value": 1.0}, "clip"),
        ({"norm": 0.0}, "clip.norm"),
        ({"value": math.inf}, "clip.value"),
        ({"norm": 1.0, "norm_type": 1.0}, "clip.norm_type"),
        ({"norm": 1.0, "per": "layer"}, "clip.per"),
        ({"value": 1.0, "per": "group"}, "clip.per"),
    ],
)
def test_a_clip_that_says_nothing_clear_is_an_error(given: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as caught:
        px.Clip(**given)
    assert [problem.where for problem in caught.value.problems] == [field]


def test_servers_clip_by_value_and_refuse_what_they_cannot_add_up(tmp_path: Path) -> None:
    expected, _ = plain(CLIPS["value"])
    same(run("dp=2 server=2", tmp_path / "run", CLIPS["value"]).state_dict(), expected)
    for how in ("inf", "group"):
        with pytest.raises(PhalanxError, match=r"job\.clip"):
            run("dp=2 server=1", tmp_path / how, CLIPS[how])


def test_groups_that_differ_by_stage_are_refused(tmp_path: Path) -> None:
    def other(params: Any) -> Any:
        head = [one for name, one in params.named() if name.startswith("head")]
        rest = [one for name, one in params.named() if not name.startswith("head")]
        return SGD([{"params": one} for one in (head, rest) if one], lr=0.1)

    with pytest.raises(PhalanxError, match="parameter groups"):
        run("pp=2 micro=8", tmp_path / "run", CLIPS["group"], optimizer=other)
