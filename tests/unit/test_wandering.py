"""How far rounding may move a bias before BatchNorm, and the running mean behind it: against torch's own Adam."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from phalanx.verify.record import END, START, RunRecord, StepRecord
from phalanx.verify.wandering import fed_by, wandering_means

pytestmark = pytest.mark.quick

LR, STEPS = 0.01, 12


def record(**options: object) -> RunRecord:
    steps = [StepRecord(loss=1.0, rates={"0.bias": LR}) for _ in range(STEPS)]
    return RunRecord(steps=steps, values={START: {}, END: {}}, options={"0.bias": options})


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.9), (0.0, 0.99), (0.95, 0.95)])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_no_gradients_move_a_running_mean_further(betas: tuple[float, float], momentum: float | None) -> None:
    fed = {"1.running_mean": ["0.bias", momentum]}
    allowed = wandering_means(record(betas=betas), ["0.bias"], fed)["1.running_mean"]
    draws, furthest = torch.Generator().manual_seed(0), 0.0
    for way in range(200):
        bias = nn.Parameter(torch.zeros(64))
        optimizer = torch.optim.Adam([bias], lr=LR, betas=betas, eps=1e-30)
        mean = torch.zeros(64)
        for step in range(STEPS):
            share = 1 / (step + 1) if momentum is None else momentum
            mean = (1 - share) * mean + share * bias.detach()
            size = torch.exp(torch.randn(64, generator=draws) * (way % 8))  # from all alike to a few that are large
            bias.grad = size * (1.0 if way % 2 else torch.randn(64, generator=draws).sign())
            optimizer.step()
        furthest = max(furthest, float(mean.abs().max()))
    assert 2 * furthest <= allowed * (1 + 1e-5)
    assert allowed < 20 * furthest  # and is no bound that nothing reaches


def test_of_other_optimizers_nothing_is_known() -> None:
    assert wandering_means(record(momentum=0.9), ["0.bias"], {"1.running_mean": ["0.bias", 0.1]}) == {}
    assert wandering_means(record(betas=(0.9, 0.999)), [], {"1.running_mean": ["0.bias", 0.1]}) == {}


def test_only_the_bias_right_before_it_feeds_a_batch_norm() -> None:
    module = nn.Sequential(
        OrderedDict(
            keys=nn.Linear(8, 8),
            values=nn.Linear(8, 8, bias=False),
            norm=nn.BatchNorm1d(8),
            conv=nn.Conv1d(8, 8, 1),
            act=nn.ReLU(),
            drop=nn.Dropout(),
            after=nn.BatchNorm1d(8, momentum=0.3),
            plain=nn.BatchNorm1d(8, track_running_stats=False),
        )
    )
    assert fed_by(module) == {"after.running_mean": ["conv.bias", 0.3]}
