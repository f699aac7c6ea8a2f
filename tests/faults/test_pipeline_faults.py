"""A model that raises on one rank of a pipeline, while others wait for what it would have sent."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from inject import LIMIT
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from phalanx.errors import WorkerError

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
from small import fit


class FaultError(Exception):
    """The model's own."""


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, faulty: Callable[[], None]) -> Tensor:
        ctx.faulty = faulty
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.faulty()
        return grads[0], None


class Layer(nn.Module):
    """Raises in a micro-batch of the second step, in forward or in backward; ``note`` then holds the time."""

    def __init__(self, where: str, note: Path) -> None:
        super().__init__()
        self.linear, self.where, self.note, self.calls = nn.Linear(9, 9), where, note, 0

    def faulty(self) -> None:
        self.calls += 1
        if self.calls == 7:
            self.note.write_text(str(time.monotonic()))
            raise FaultError("the model's own error")

    def forward(self, x: Tensor) -> Tensor:
        real = not isinstance(x, FakeTensor) and torch.is_grad_enabled()
        if self.where == "forward" and real:
            self.faulty()
        x = torch.relu(self.linear(x))
        return Backward.apply(x, self.faulty) if self.where == "backward" and real else x  # pyright: ignore


class Model(nn.Module):
    def __init__(self, at: int, where: str, note: Path) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(where if index == at else "", note) for index in range(8)])
        self.head = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize(("where", "at"), [("forward", 0), ("backward", 7)])
@pytest.mark.parametrize(
    "plan",
    [
        "pp=2 micro=8",
        "pp=2 micro=8 schedule=interleaved",
        "pp=2 micro=8 schedule=zero-bubble",
        "pp=2 micro=8 recompute=full",
        "pp=4 micro=8",
        "pp=2 fsdp=2 micro=4",
    ],
)
@pytest.mark.alone
def test_all_ranks_end_and_the_models_own_error_is_told(plan: str, where: str, at: int, tmp_path: Path) -> None:
    note = tmp_path / "note"
    with pytest.raises(WorkerError) as raised:
        fit(plan, tmp_path / "run", model=lambda: Model(at, where, note))
    assert time.monotonic() - float(note.read_text()) < LIMIT
    assert raised.value.kind == "FaultError"
    assert "the model's own error" in str(raised.value)
    assert "raise FaultError" in raised.value.traceback


@pytest.mark.parametrize("plan", ["pp=2 micro=8", "pp=2 micro=8 schedule=zero-bubble"])
def test_an_error_of_the_loss_is_that_of_the_last_stage(plan: str, tmp_path: Path) -> None:
    calls: list[None] = []

    def loss(output: Tensor, batch: Any) -> Any:
        if not isinstance(output, FakeTensor) and not batch["y"].is_meta and output.grad_fn is not None:
            calls.append(None)
            if len(calls) == 6:  # in the second step: what fails in the first is told before it
                raise FaultError("the loss's own error")
        return nn.functional.cross_entropy(output, batch["y"])

    with pytest.raises(WorkerError, match="the loss's own error") as raised:
        fit(plan, tmp_path / "run", loss=loss)
    assert raised.value.rank == 1


def test_an_error_between_layers_is_told(tmp_path: Path) -> None:
    """What a model does between its units runs on every stage, on stand-ins where values are another's."""

    class Between(Model):
        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            if x.shape[0] == 7:  # of the last, shorter batch
                raise FaultError("the model's own error")
            return super().forward(x)

    with pytest.raises(WorkerError) as raised:
        fit("pp=2", tmp_path / "run", model=lambda: Between(0, "", tmp_path))
    assert raised.value.kind == "FaultError"


def test_the_same_model_without_its_fault_trains(tmp_path: Path) -> None:
    assert len(fit("pp=2 micro=8", tmp_path / "run", model=lambda: Model(0, "", tmp_path), epochs=1).losses) == 4
