"""Data are made with the numbers of the job's seed, whatever was drawn before, and what is drawn afterwards stays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset, random_split

import phalanx as px
from phalanx.witness.plain_loop import Witness


def parts() -> tuple[object, ...]:
    noise = torch.from_numpy(np.random.rand(100, 1)).float()
    return tuple(random_split(TensorDataset(torch.arange(100.0)[:, None], noise), [80, 20]))


def noted(seen: list[list[int]], part: object) -> object:
    seen.append(sorted(part.indices))
    return part


@pytest.mark.parametrize("way", ["built", "plain loop"])
def test_a_random_split_in_data_and_evaluate_shares_no_sample(way: str) -> None:
    trained, evaluated = list[list[int]](), list[list[int]]()
    job = px.Job(
        model=lambda: nn.Linear(1, 1),
        data=lambda: noted(trained, parts()[0]),
        evaluate=lambda: noted(evaluated, parts()[1]),
        loss=lambda output, batch: px.mse(output, batch[1]),
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-6),
        batch=20,
        steps=1,
        seed=3,
    )
    torch.manual_seed(8)
    if way == "built":
        loop = px.build(job, px.Plan())
        torch.rand(5)
        before = torch.get_rng_state()
        loop[0].evaluate()
        assert torch.equal(before, torch.get_rng_state())
    else:
        Witness.of(job, 1)
    assert len({tuple(one) for one in trained}) == len({tuple(one) for one in evaluated}) == 1
    assert sorted(trained[0] + evaluated[0]) == list(range(100))
