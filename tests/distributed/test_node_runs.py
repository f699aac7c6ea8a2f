"""Nodes as ``torchdata.nodes`` has them, which are streams: under several plans, beside a plain loop over the rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small import BATCH, LENGTH, Net, fit, job, table
from torch.nn.functional import cross_entropy

import phalanx as px
from phalanx.train.build_model import build_model

HOW: dict[str, Any] = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1)}
STEPS = [slice(start, min(start + BATCH, LENGTH)) for _ in range(2) for start in range(0, LENGTH, BATCH)]


class Rows:
    """A node: the iterator of one pass over the rows, until it is reset."""

    def __init__(self) -> None:
        self.rows, self.at = table(), 0

    def reset(self, initial_state: dict[str, int] | None = None) -> None:
        self.at = (initial_state or {"at": 0})["at"]

    def get_state(self) -> dict[str, int]:
        return {"at": self.at}

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.at == LENGTH:
            raise StopIteration
        self.at += 1
        return self.rows[self.at - 1]


class NodeLoader:
    """Passes over a node, each from the begin or from a state: ``torchdata.nodes.Loader``."""

    def __init__(self) -> None:
        self.root, self.state = Rows(), dict[str, int]()

    def __iter__(self) -> Iterator[Any]:
        self.root.reset(self.state or None)
        self.state = {}
        return self.root

    def state_dict(self) -> dict[str, int]:
        return self.root.get_state()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


def plain_losses() -> list[float]:
    """Plain PyTorch on one device."""
    net, losses, rows = Net(), list[float](), table().columns
    net.load_state_dict(build_model(job(**HOW)).state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in STEPS:
        loss = cross_entropy(net(rows["x"][step]), rows["y"][step])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("data", [Rows, NodeLoader])
@pytest.mark.parametrize("plan", ["single", "dp=2", "fsdp=2 micro=2"])
def test_a_run_goes_through_the_rows(plan: str, data: Any, tmp_path: Path) -> None:
    run = fit(plan, tmp_path / "run", **HOW, data=data)
    assert run.losses == pytest.approx(plain_losses(), abs=2e-6)


@pytest.mark.parametrize("data", [Rows, NodeLoader])
def test_a_resume_in_mid_epoch_under_another_plan(data: Any, tmp_path: Path) -> None:
    fit("dp=2", tmp_path / "run", **HOW, data=data, epochs=None, steps=5)
    run = fit("fsdp=2 micro=2", tmp_path / "run", resume=True, **HOW, data=data)
    assert run.losses[-3:] == pytest.approx(plain_losses()[-3:], abs=2e-6)


@pytest.mark.parametrize("data", [Rows, NodeLoader])
def test_two_passes_are_proven(data: Any) -> None:
    assert "is equal to one device over 6 steps" in str(px.prove(job(**HOW, data=data), "dp=2", steps=6))  # of 4 a pass


class Counted(Rows):
    """Each reset begins another pass, in another order: a sampler with ``set_epoch`` behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = -1

    def reset(self, initial_state: dict[str, int] | None = None) -> None:
        super().reset(initial_state)
        self.passes += 1

    def __next__(self) -> Any:
        super().__next__()
        return self.rows[(self.at * 7 + 13 * self.passes) % LENGTH]


def read_once() -> Iterator[Any]:
    yield from (table()[index] for index in range(LENGTH))


@pytest.mark.parametrize("plan", ["single recompute=full", "fsdp=2"])
@pytest.mark.parametrize(("data", "epochs"), [(Counted, 2), (read_once, 1)], ids=["node", "generator"])
def test_a_look_at_the_model_takes_no_samples(data: Any, epochs: int, plan: str, tmp_path: Path) -> None:
    plain = fit("single", tmp_path / "plain", **HOW, data=data, epochs=epochs)
    looked = fit(plan, tmp_path / "looked", **HOW, data=data, epochs=epochs)
    assert looked.losses == pytest.approx(plain.losses, rel=1e-5)
