"""A learning rate by a function of one's own: the same under every plan and after a resume, and proven."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small import fit, job

import phalanx as px


def rate(step: int) -> float:
    return 0.9**step if step < 5 else 0.1


@pytest.mark.parametrize("plan", ["single", "dp=2", "fsdp=2", "dp=2 server=1", "dp=2 sync=local every=2"])
def test_rates_are_those_of_the_function(plan: str, tmp_path: Path) -> None:
    run = fit(plan, tmp_path / "run", schedule=rate)
    rates = [event["lr"] for event in run.events("step")]
    assert rates == pytest.approx([1e-2 * rate(step) for step in range(8)], rel=1e-12)


def test_a_resumed_run_has_the_rates_it_would_have_had(tmp_path: Path) -> None:
    whole = fit("dp=2", tmp_path / "whole", schedule=rate)
    fit("dp=2", tmp_path / "parts", schedule=rate, epochs=None, steps=3)
    parts = fit("dp=2", tmp_path / "parts", schedule=rate, resume=True)
    assert parts.losses == whole.losses


def test_it_is_proven_against_a_loop_with_lambda_lr() -> None:
    proof = px.prove(job(schedule=rate), "dp=2", steps=8)
    assert proof.equal, proof


def test_it_steps_as_torch_does(tmp_path: Path) -> None:
    """Beside a scheduler of torch's on plain PyTorch, over the very samples of the run."""
    run = fit("single", tmp_path / "run", schedule=rate, drop_last=True)
    constant = fit("single", tmp_path / "constant", drop_last=True)
    assert run.losses[1:] != constant.losses[1:]
    assert run.losses[0] == constant.losses[0]
    torn = px.Schedule(function=rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0), rate)
    for step in range(8):
        assert scheduler.get_last_lr()[0] == torn.factor(step=step, batch=1, total_steps=8)
        scheduler.optimizer.step()
        scheduler.step()
