"""Loops of one's own around ``px.build``, under torchrun: ``own_loop.py NAME PLAN``.

Prints the numbers that it gives, and those of plain PyTorch. Nothing is shuffled, so that the plain loop beside it
knows which samples a step has.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from case_models import Branch
from torch import Tensor, nn

import phalanx as px
from phalanx.errors import SpecError

BATCH, STEPS, WIDTH = 16, 8, 6


def data() -> px.Table:
    generator = torch.Generator().manual_seed(2)
    real = torch.randn(BATCH * STEPS, WIDTH, generator=generator) * 0.5 + 1.0
    return px.Table(real=real, noise=torch.randn(BATCH * STEPS, WIDTH, generator=generator))


def batch_at(step: int) -> dict[str, Tensor]:
    return data().__getitems__(np.arange(step * BATCH, (step + 1) * BATCH))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), *[Branch() for _ in range(3)], nn.Linear(16, WIDTH))


def job(model: nn.Module, **how: Any) -> px.Job:
    given = {"data": data, "batch": BATCH, "steps": STEPS, "shuffle": False, **how}
    return px.Job(model=lambda: model, optimizer=lambda params: torch.optim.Adam(params, 1e-2), **given)


def scored(found: Tensor) -> Tensor:
    return found.mean(-1)


def judged(found: Tensor) -> tuple[Tensor, int]:
    """The critic's loss: real samples first, as many made ones behind them."""
    real, made = scored(found).chunk(2)
    return F.softplus(-real).sum() + F.softplus(made).sum(), len(real)


def fooled(found: Tensor) -> tuple[Tensor, int]:
    return F.softplus(-scored(found)).sum(), len(found)


def two_builds(plan: str) -> tuple[list[float], list[float]]:
    """A critic and a maker in turn, each with a build; a step of one leaves gradients in the other."""
    torch.manual_seed(0)
    maker, critic = net(), net()
    plain = plain_pair(copy.deepcopy(maker), copy.deepcopy(critic))
    step_critic, of_critic = px.build(
        job(
            critic,
            inputs=lambda batch: torch.cat([batch["real"], maker(batch["noise"]).detach()]),
            loss=lambda output, batch: px.Loss(*judged(output)),
        ),
        plan,
    )
    step_maker, of_maker = px.build(
        job(maker, inputs=lambda batch: batch["noise"], loss=lambda output, batch: px.Loss(*fooled(critic(output)))),
        plan,
    )
    losses = []
    for first, second in zip(of_critic, of_maker, strict=True):
        losses += [step_critic(first).loss, step_maker(second).loss]
    return losses, plain


def plain_pair(maker: nn.Module, critic: nn.Module) -> list[float]:
    with_critic, with_maker = (torch.optim.Adam(one.parameters(), 1e-2) for one in (critic, maker))
    losses = []
    for step in range(STEPS):
        batch = batch_at(step)
        with_critic.zero_grad()
        total, count = judged(critic(torch.cat([batch["real"], maker(batch["noise"]).detach()])))
        (total / count).backward()
        with_critic.step()
        losses.append(float(total) / count)
        with_maker.zero_grad()
        total, count = fooled(critic(maker(batch["noise"])))
        (total / count).backward()
        with_maker.step()
        losses.append(float(total) / count)
    return losses


def left_behind(plan: str) -> tuple[list[float], list[float]]:
    """Gradients lie where a step begins, which are not its own."""
    torch.manual_seed(0)
    model = net()
    plain = plain_norms(copy.deepcopy(model))
    step, loader = px.build(
        job(
            model,
            inputs=lambda batch: batch["noise"],
            loss=lambda output, batch: px.mse(output, batch["real"]),
            clip=9.0,
        ),
        plan,
    )
    norms = []
    for batch in loader:
        for one in step.layout.parameters.values():
            one.grad = torch.full_like(one, 1000.0)
        norms.append(step(batch).grad_norm)
    return norms, plain


def plain_norms(model: nn.Module) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    norms = []
    for step in range(STEPS):
        batch = batch_at(step)
        optimizer.zero_grad()
        F.mse_loss(model(batch["noise"]), batch["real"]).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 9.0)))
        optimizer.step()
    return norms


LOOPS = {"two builds": two_builds, "gradients left behind": left_behind}


def main(name: str, plan: str) -> None:
    torch.set_num_threads(1)
    told: dict[str, Any]
    try:
        found, plain = LOOPS[name](plan)
        told = {"found": found, "plain": plain}
    except SpecError as error:
        told = {"refused": str(error), "where": [one.where for one in error.problems]}
    if os.environ["RANK"] == "0":
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
