"""What shares follow, on CUDA: events in place of the host's clock, and the device's own memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from phalanx.device_kinds import kind_named
from phalanx.parallel import RankHoldings
from phalanx.train.uneven_shares import MemoryRoom, Stopwatch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backward", [True, False])
def test_a_step_is_timed_on_the_device(backward: bool) -> None:
    module = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).cuda()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    held = RankHoldings(module=module, parameters=dict(module.named_parameters()))
    watch = Stopwatch(held, optimizer, kind_named("cuda"), backward=backward)
    seconds: list[float] = []
    for samples in (64, 16384, 64, 16384):
        module(torch.ones(samples, 1024, device="cuda")).sum().backward()
        optimizer.step()
        lap = watch.lap()
        assert lap.update > 0
        seconds.append(lap.passes)
    assert seconds[3] > seconds[2] > 0


def test_memory_is_the_devices() -> None:
    module = nn.Linear(4096, 4096).cuda()
    module(torch.ones(512, 4096, device="cuda")).sum().backward()
    module.zero_grad()
    room = MemoryRoom(kind_named("cuda"), workers_here=1, bounded=False)
    room.took(512)
    assert 512 < room.most() < math.inf
