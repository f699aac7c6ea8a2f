"""Optimizers on parameters that are sharded or split by name: LARS and LAMB step as on whole parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from checkpoint_ranks import FORKS_BESIDE_THREADS, local, ranks
from split_layouts import SHAPES, laid_out, own, value
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import phalanx as px
from law_rows import longer
from phalanx.config import Plan
from phalanx.errors import RefusedError
from phalanx.parallel import RankHoldings
from phalanx.train.elementwise import elementwise, half_steps, note_slices
from phalanx.train.optimizers import LAMB, LARS

pytestmark = FORKS_BESIDE_THREADS


STEPS = 4
OPTIMIZERS = {
    "lars": lambda groups: LARS(groups, lr=0.5, weight_decay=0.01, trust_coefficient=0.1),
    "lars-nesterov": lambda groups: LARS(groups, lr=0.5, nesterov=True, lr_in_velocity=True, exclude_1d=False),
    "lamb": lambda groups: LAMB(groups, lr=0.05, weight_decay=0.1),
    "lamb-clipped": lambda groups: LAMB(groups, lr=0.05, trust_clip=(0.5, 2.0), exclude_1d=False),
}


def test_fully_shard_equals_one_process() -> None:
    def train(name: str, model: nn.Module, x: torch.Tensor) -> nn.Module:
        optimizer = OPTIMIZERS[name](list(model.parameters()))
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return model

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))

    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))

    def target(rank: int) -> None:
        for name in ("lars", "lamb"):
            expected = dict(train(name, made(), x).named_parameters())
            sharded = train(name, fully_shard(made(), mesh=init_device_mesh("cpu", (2,))), x)
            for key, parameter in sharded.named_parameters():
                torch.testing.assert_close(parameter.full_tensor(), expected[key].detach(), rtol=2e-6, atol=1e-7)

    ranks(2, target)


def stepped(name: str, held: RankHoldings) -> None:
    optimizer = OPTIMIZERS[name](list(held.parameters.values()))
    for step in range(3):
        for key, parameter in held.parameters.items():
            parameter.grad = own(value(f"gradient {key} {step}", SHAPES[key]), key, parameter, held)
        optimizer.step()


def furthest(name: str, held: RankHoldings) -> float:
    """How far the parameters are from those of one process, after three steps."""
    straight = laid_out("single").holdings
    stepped(name, straight)
    stepped(name, held)
    away = 0.0
    for key, parameter in held.parameters.items():
        expected = local(own(straight.parameters[key].detach(), key, parameter, held))
        if expected.numel():
            away = max(away, float((local(parameter.detach()) - expected).abs().max()))
    return away


@pytest.mark.parametrize(
    "plans", [("fsdp=2 tp=2", "fsdp=2 tp=2 zero=1", "pp=2 tp=2", "ep=2 tp=2"), *longer((("tp=3",),))]
)
def test_split_equals_whole(plans: tuple[str, ...]) -> None:
    def target(rank: int) -> None:
        for plan in plans:
            for name in OPTIMIZERS:
                held = laid_out(plan, rank).holdings
                note_slices(held)
                assert furthest(name, held) < 1e-6, (plan, name)

    ranks(Plan.parse(plans[0]).world_size, target)


WEIGHTS = {"up": nn.Parameter(torch.zeros(8, 4)), "bias": nn.Parameter(torch.zeros(8))}


def test_most_optimizers_treat_each_element_by_itself() -> None:
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad):
        assert elementwise(squares(kind, lr=0.0), WEIGHTS)


class Other(torch.optim.SGD):
    def __init__(self, params: Any, *, must: int) -> None:
        super().__init__(params, lr=must)


class Normed(Other):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad / parameter.grad.norm()


def picky(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    if params[0].shape != (64, 8):
        raise ValueError("made for one model alone")
    return torch.optim.SGD(params, lr=1e-2)


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [(lambda params: Normed(params, must=1), "steps a whole parameter otherwise"), (picky, "made for one model alone")],
)
def test_what_is_not_elementwise_or_not_known_is_refused_where_parameters_are_slices(optimizer: Any, why: str) -> None:
    job = replace(squares(None), optimizer=optimizer)
    with pytest.raises(RefusedError, match=why) as caught:
        px.prove(job, "tp=2", steps=1)
    assert caught.value.problems[0].fix == "dp=2"


def squares(kind: Any, lr: float = 1e-2) -> px.Job:
    def model() -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Linear(8, 64, bias=False), nn.ReLU(), nn.Linear(64, 8, bias=False)))

    return px.Job(
        model=model,
        data=lambda: list(torch.linspace(-1, 1, 64).view(8, 8)),
        loss=lambda output, batch: (output - batch).square().mean(),
        optimizer=lambda params: kind(params, lr=lr),
        batch=4,
        steps=2,
    )


@pytest.mark.parametrize("kind", [torch.optim.Muon, *longer(torch.optim.Adafactor)])
def test_one_that_looks_at_whole_parameters_is_refused_where_they_are_slices(kind: Any) -> None:
    with pytest.raises(RefusedError, match=f"{kind.__name__} under tp=2") as caught:
        px.prove(squares(kind), "tp=2", steps=1)
    assert caught.value.exit_code == 2
    assert px.prove(squares(kind), caught.value.problems[0].fix, steps=2).equal


@pytest.mark.parametrize(
    ("kind", "plan"), [(torch.optim.Adafactor, "fsdp=2"), *longer((torch.optim.Rprop, "fsdp=2 zero=1"))]
)
def test_one_that_fails_on_rows_is_refused_before_the_first_step(kind: Any, plan: str) -> None:
    with pytest.raises(RefusedError, match=f"{kind.__name__} under {plan}: it fails on rows") as caught:
        px.prove(squares(kind), plan, steps=1)
    assert caught.value.problems[0].fix == "dp=2"


def test_one_that_steps_rows_otherwise_is_refused() -> None:
    class OfThisRank(Normed):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    mine, grad = local(parameter), local(parameter.grad)
                    mine -= group["lr"] * grad / grad.norm()

    job = replace(squares(None), optimizer=lambda params: OfThisRank(params, must=1))
    with pytest.raises(RefusedError, match="steps rows on several ranks otherwise"):
        px.prove(job, "fsdp=2", steps=1)


def test_half_precision_within_a_step_is_named() -> None:
    muon = half_steps(squares(torch.optim.Muon), {"up": WEIGHTS["up"]})
    assert muon.startswith("Muon computes its step in bfloat16")
    assert half_steps(squares(torch.optim.Adafactor), WEIGHTS) == ""
