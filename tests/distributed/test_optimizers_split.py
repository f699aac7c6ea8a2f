"""Optimizers on parameters that are sharded or split by name: LARS and LAMB step as on whole parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_ranks import FORKS_BESIDE_THREADS, local, ranks
from split_layouts import SHAPES, laid_out, own, value
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import phalanx as px
from longer import longer
from phalanx.config import Plan
from phalanx.errors import RefusedError
from phalanx.parallel import RankHoldings
from phalanx.train.elementwise import _GROUPS, elementwise, groups_of_slices, half_steps, note_slices
from phalanx.train.optimizers import LAMB, LARS

pytestmark = FORKS_BESIDE_THREADS


# 2 rows on 3 ranks leave one rank without any; 5 and 7 rows divide over neither 2 nor 3.
WHOLE_SHAPES = [(5, 4), (2, 3), (7,), (4, 2, 3), (1,)]
STEPS = 4
OPTIMIZERS = {
    "lars": lambda groups: LARS(groups, lr=0.5, weight_decay=0.01, trust_coefficient=0.1),
    "lars-nesterov": lambda groups: LARS(groups, lr=0.5, nesterov=True, lr_in_velocity=True, exclude_1d=False),
    "lamb": lambda groups: LAMB(groups, lr=0.05, weight_decay=0.1),
    "lamb-clipped": lambda groups: LAMB(groups, lr=0.05, trust_clip=(0.5, 2.0), exclude_1d=False),
}


def values(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in WHOLE_SHAPES]


def stepped_whole(name: str, parameters: list[Any], place_gradient: Callable[..., Any]) -> torch.optim.Optimizer:
    """Take a few steps, in two groups, with gradients that depend on the step alone."""
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.2}]
    optimizer = OPTIMIZERS[name](groups)
    for step in range(STEPS):
        for parameter, gradient in zip(parameters, values(100 + step), strict=True):
            parameter.grad = place_gradient(gradient)
        optimizer.step()
    return optimizer


def plain(name: str) -> list[torch.Tensor]:
    parameters = [nn.Parameter(value) for value in values(0)]
    stepped_whole(name, parameters, lambda gradient: gradient)
    return [parameter.detach() for parameter in parameters]


def check_against_plain(name: str, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
    def place(value: torch.Tensor) -> DTensor:
        return distribute_tensor(value, mesh, placements)

    calls: list[int] = []
    original: Any = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    parameters = [nn.Parameter(place(value)) for value in values(0)]
    optimizer = stepped_whole(name, parameters, place)
    dist.all_reduce = original
    assert len(calls) == (STEPS if any(placement.is_shard() for placement in placements) else 0)
    for parameter, expected in zip(parameters, plain(name), strict=True):
        assert isinstance(parameter, DTensor)
        torch.testing.assert_close(parameter.full_tensor(), expected, rtol=2e-6, atol=1e-7)
        for key, kept in optimizer.state[parameter].items():
            if key == "step":
                assert kept.item() == STEPS
            else:
                assert isinstance(kept, DTensor)
                assert (kept.placements, kept.shape) == (parameter.placements, parameter.shape)


def test_hybrid_mesh_equals_plain() -> None:
    def target(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))
        for name in OPTIMIZERS:
            check_against_plain(name, mesh, (Replicate(), Shard(0)))

    ranks(4, target)


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


@pytest.mark.parametrize("plans", [("tp=3",), ("fsdp=2 tp=2", "fsdp=2 tp=2 zero=1", "pp=2 tp=2", "ep=2 tp=2")])
def test_split_equals_whole(plans: tuple[str, ...]) -> None:
    def target(rank: int) -> None:
        for plan in plans:
            for name in OPTIMIZERS:
                held = laid_out(plan, rank).holdings
                note_slices(held)
                assert furthest(name, held) < 1e-6, (plan, name)

    ranks(Plan.parse(plans[0]).world_size, target)


def test_notes_end_with_their_parameters_and_are_not_copied() -> None:
    def target(rank: int) -> None:
        held = laid_out("tp=2", rank).holdings
        note_slices(held)
        parameter = held.parameters["down"]
        assert len(groups_of_slices(parameter)) == 1
        assert groups_of_slices(copy.deepcopy(parameter)) == ()
        assert groups_of_slices(held.parameters["norm"]) == ()
        known = len(_GROUPS)
        del held, parameter
        assert len(_GROUPS) < known

    ranks(2, target)
    assert groups_of_slices(nn.Parameter(torch.zeros(1))) == ()


WEIGHTS = {"up": nn.Parameter(torch.zeros(8, 4)), "bias": nn.Parameter(torch.zeros(8))}


def test_most_optimizers_treat_each_element_by_itself() -> None:
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad):
        assert elementwise(squares(kind, lr=0.0), WEIGHTS)


class Other(torch.optim.SGD):
    """Not to be built from its defaults."""

    def __init__(self, params: Any, *, must: int) -> None:
        super().__init__(params, lr=must)


class Normed(Other):
    """Steps by the norm of a whole parameter's gradient."""

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


def test_optimizers_are_made_as_the_job_makes_them() -> None:
    assert elementwise(replace(squares(None), optimizer=lambda params: Other(params, must=1)), WEIGHTS)
    assert not elementwise(replace(squares(None), optimizer=lambda params: Normed(params, must=1)), WEIGHTS)


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (lambda params: Normed(params, must=1), "steps a whole parameter otherwise"),
        (picky, "made for one model alone"),
    ],
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


@pytest.mark.parametrize(("kind", "plan"), [(torch.optim.Adafactor, "fsdp=2"), (torch.optim.Rprop, "fsdp=2 zero=1")])
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
