"""What a run of many ranks does otherwise, done by few: each gives the losses of plain PyTorch on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small import LENGTH, fit, job, table
from torch import nn
from torch.nn.functional import cross_entropy

from phalanx.comm import mesh
from phalanx.data import audit, host_ledger, sampler
from phalanx.data.sampler import Permutation
from phalanx.launch import addresses
from phalanx.train.build_model import build_model


class Block(nn.Module):
    """Two layers that share out their weights under tp."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(9, 16), nn.Linear(16, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Four blocks between two layers with one weight: in a pipeline only the first and the last stage have it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(9, 9, bias=False), nn.ModuleList(Block() for _ in range(4))
        self.last, self.head = nn.Linear(9, 9, bias=False), nn.Linear(9, 5)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.tanh(self.last(x)))


HOW: dict[str, Any] = {
    "model": Net,
    "inputs": lambda batch: batch["x"],
    "optimizer": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


def plain(length: int, batch: int, epochs: int) -> list[float]:
    """The losses of a loop by hand over the permutations of the job's seed."""
    net, losses, columns = Net(), list[float](), table(length).columns
    net.load_state_dict(build_model(job(**HOW)).state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        order = torch.from_numpy(Permutation.keyed(length, 0, epoch)(torch.arange(length).numpy()))
        for ids in order.split(batch):
            loss = cross_entropy(net(columns["x"][ids]), columns["y"][ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who talks is connected as it first does, ranks of a host share a ledger, of a batch a rank knows its own part."""
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    monkeypatch.setattr(addresses, "_MOST_CONNECTED", 1)
    monkeypatch.setattr(host_ledger, "MOST_FILES", 1)
    monkeypatch.setattr("phalanx.data.map_style.BLOCK", 1)


def of_later_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are made by ``dist.new_group``, all ranks taking part in each."""
    monkeypatch.setattr(mesh, "_READ", (2, 10))


@pytest.mark.parametrize("way", [of_many, of_later_torch])
@pytest.mark.parametrize(
    "plan",
    [
        "dp=3",
        "dp=2 fsdp=2",
        "dp=2 fsdp=2 zero=1 micro=3",
        "fsdp=2 tp=2",
        "pp=2 tp=2 micro=4",
        "pp=3 micro=4",
        "dp=2 pp=2 micro=4",
        "dp=3 shares=2,1,1",
    ],
)
def test_it_trains_as_one_device_and_goes_on(
    plan: str, way: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    way(monkeypatch)
    fit(plan, tmp_path / "run", **{**HOW, "epochs": None, "steps": 5})
    run = fit(plan, tmp_path / "run", resume=True, **HOW)
    assert run.losses == pytest.approx(plain(LENGTH, 32, 2), abs=5e-6)
    assert audit(run.folder / "ledger", length=LENGTH, batch=32, drop_last=False) == []


@pytest.mark.parametrize("plan", ["single", "dp=3", "threads=2", "fsdp=2 micro=1000", "dp=3 shares=2,1,1"])
def test_of_a_large_batch_a_rank_knows_its_own_part(plan: str, tmp_path: Path) -> None:
    length, batch = 20000, sampler.BLOCK + 7
    how = {**HOW, "data": lambda: table(length), "batch": batch}
    run = fit(plan, tmp_path / "run", **how)
    assert run.losses == pytest.approx(plain(length, batch, 2), abs=5e-6)
    assert audit(run.folder / "ledger", length=length, batch=batch, drop_last=False) == []
