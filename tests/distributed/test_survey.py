"""Shards that a survey of a plan names are those that ranks hold; tp talks no more than Megatron-LM."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx as px
from law_rows import longer
from phalanx.comm import Place, default_process_group, local
from phalanx.config import Plan
from phalanx.demo.jobs.gpt import Size, gpt_job
from phalanx.launch.local import launch
from phalanx.placement.ownership import TensorPiece
from phalanx.train.assembly import build
from phalanx.train.build_model import build_model
from phalanx.train.look_ahead import preview
from phalanx.train.step import StepObserver


class Rows(nn.Module):
    """Blocks whose rows do not divide over ranks, one parameter that does not learn, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(7, 7) for _ in range(2)])
        self.norm = nn.BatchNorm1d(7)
        self.head = nn.Linear(7, 3)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(self.norm(x))


def rows() -> px.Job:
    generator = torch.Generator().manual_seed(0)
    table = px.Table(x=torch.randn(16, 7, generator=generator), y=torch.randint(3, (16,), generator=generator))
    return px.Job(
        model=Rows,
        data=lambda: table,
        loss=lambda output, batch: px.cross_entropy(output, batch["y"]),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        batch=8,
        steps=1,
    )


def gpt() -> px.Job:
    return replace(gpt_job(layers=2, width=32, heads=4, context=12, batch=8, steps=1), evaluate=None, metrics=None)


def gpt2() -> px.Job:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 12}
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return replace(
        gpt(),
        model=lambda: GPT2LMHeadModel(config),
        loss=lambda output, batch: px.cross_entropy(output.logits, batch["tokens"][:, 1:]),
    )


def moe() -> px.Job:
    spec = importlib.util.spec_from_file_location("moe", Path(__file__).parents[2] / "examples" / "moe.py")
    module: Any = sys.modules.setdefault("moe", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    table = px.Table(tokens=torch.randint(0, 256, (40, 13), generator=torch.Generator().manual_seed(0)))
    size = Size(layers=2, width=16, heads=2, context=12)
    job = replace(module.job(), model=lambda: module.MoE(size), data=lambda: table, batch=8, steps=1)
    return replace(job, evaluate=None, metrics=None)


ON_TWO = [
    (rows, "dp=2"),
    (rows, "fsdp=2 zero=1"),
    (rows, "fsdp=2 zero=1 micro=2"),
    (rows, "fsdp=2 zero=1 micro=8"),  # one micro-batch, which is scattered as it comes
    (rows, "fsdp=2 zero=1 micro=4"),  # which splits nothing of a batch of 8
    (rows, "fsdp=2 zero=2"),
    (rows, "fsdp=2 zero=3"),
    (gpt, "pp=2 schedule=zbv micro=2"),
    (gpt2, "pp=2"),
    (moe, "ep=2"),
]
ON_FOUR = [
    (rows, "dp=2 fsdp=2"),
    (gpt, "tp=2 fsdp=2 zero=1 sequence=true"),
    (gpt, "pp=2 fsdp=2 zero=1"),
    (moe, "pp=2 ep=2"),
]
MORE_ON_FOUR = [(gpt, "tp=2 fsdp=2 zero=2"), (gpt, "cp=2 fsdp=2"), (gpt2, "pp=2 fsdp=2 zero=1")]


@pytest.mark.parametrize(
    "given",
    [
        ON_TWO,
        [(gpt2, "tp=3")],
        *longer(ON_FOUR, [(moe, "ep=3 fsdp=2")], [(moe, "ep=2 tp=2 fsdp=2 zero=1")], MORE_ON_FOUR),
    ],
    ids=["2", "3", "4", "6", "8", "more"],
)
def test_ranks_hold_what_was_said(given: list[tuple[Callable[[], px.Job], str]]) -> None:
    each = [(job(), Plan.parse(f"{plan} device=cpu")) for job, plan in given]
    for (made, chosen), *ranks in zip(each, *launch(held_by_rank(each), each[0][1].world_size), strict=True):
        said_of_ranks(made, chosen, ranks)


def said_of_ranks(made: px.Job, chosen: Plan, ranks: list[dict[str, Any]]) -> None:
    wholes = {name: tensor.detach() for name, tensor in build_model(made).named_parameters()}
    found = preview(made, chosen)[0]
    assert {tensor.name: tensor.shape for tensor in found.parameters} == {n: tuple(t.shape) for n, t in wholes.items()}
    for rank, seen in enumerate(ranks):
        held = found.shards_of(rank)
        assert seen["parameters"] == {one.tensor.name: told(one.parameter, wholes[one.tensor.name]) for one in held}
        assert seen["stepped"] == {
            one.tensor.name: told(one.stepped, wholes[one.tensor.name]) for one in held if one.stepped
        }
        assert seen["gradients"] == {one.tensor.name: list(one.gradient.shape) for one in held if one.gradient}
        assert seen["bytes"] == sum(one.bytes for one in held)
        assert seen["buffers"] == {tensor.name: list(tensor.shape) for tensor in found.buffers}


def held_by_rank(given: list[tuple[px.Job, Plan]]) -> Callable[..., list[dict[str, Any]]]:
    """A worker's work: what it holds before its first step, and of gradients when they are complete."""

    def work(place: Place, report: Any) -> list[dict[str, Any]]:
        return [held(job, plan, place) for job, plan in given]

    def held(job: px.Job, plan: Plan, place: Place) -> dict[str, Any]:
        with default_process_group(place, torch.device("cpu")):
            assembly = build(job, plan, place, torch.device("cpu"))
            layout, gradients = assembly.layout, dict[str, list[int]]()
            own = {name: local(tensor.detach()) for name, tensor in layout.module.named_parameters()}
            found = {
                "parameters": {name: summed(tensor) for name, tensor in own.items()},
                "stepped": {name: summed(local(tensor.detach())) for name, tensor in layout.parameters.items()},
                "bytes": sum(tensor.numel() * tensor.itemsize for tensor in own.values()),
                "buffers": {name: list(tensor.shape) for name, tensor in layout.module.named_buffers()},
                "gradients": gradients,
            }

            def look() -> None:
                """What there is first: whole gradients, if there are any, are dropped as shards take their place."""
                for tensors in (layout.module.named_parameters(), layout.parameters.items()):
                    for name, tensor in tensors:
                        if tensor.grad is not None:
                            gradients.setdefault(name, list(local(tensor.grad).shape))

            def around(context: Any) -> Any:
                look()
                return context

            assembly.step.watch = StepObserver(around=around, gradients=look)
            assembly.step(next(iter(assembly.loader)))
            return found

    return work


def told(piece: TensorPiece, whole: Tensor) -> list[Any]:
    """The form that the survey gives a piece, and the sum over the elements that it says are in it."""
    for dim, ranges in enumerate(piece.ranges):
        index = [torch.arange(start, stop) for start, stop in ranges]
        whole = whole.index_select(dim, torch.cat(index) if index else torch.arange(0))
    assert tuple(whole.shape) == piece.shape
    return summed(whole)


def summed(tensor: Tensor) -> list[Any]:
    flat = tensor.double().flatten()
    return [list(tensor.shape), round(float(flat @ torch.arange(1.0, len(flat) + 1, dtype=torch.double)), 6)]


@pytest.mark.parametrize("plan", ["tp=2", *longer("tp=3 sequence=true")])
def test_whatever_the_job_says_of_cuts_it_learns_the_same(plan: str) -> None:
    odd: dict[str, Any] = {"*.query_key_value": "rowwise", "*.up": "rowwise", "*.down": "whole", "token": "colwise"}
    proof = px.prove(replace(gpt(), batch=5, clip=0.5, tensor_parallel=odd), plan, steps=3)
    assert proof.equal, proof.first
